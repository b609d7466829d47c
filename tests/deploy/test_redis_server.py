"""A Redis of our own: found both ways, answering, with Lua, and gone afterwards."""

import asyncio
import shutil
from pathlib import Path

import pytest

from deploy import redis_server
from deploy.health import free_ports, redis_probe
from deploy.process import supervise
from deploy.redis_server import RedisMissing, find_redis_server, own_redis, packaged_redis_server


async def command(url: str, *words: str) -> bytes:
    """One Redis command over a plain socket; the first line of the answer."""
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
        writer.write("".join(parts).encode())
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return answer.strip()


def fake_binary(directory: Path) -> Path:
    binary = directory / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return binary


def test_the_one_on_path_is_preferred(tmp_path: Path) -> None:
    assert find_redis_server(str(tmp_path)) != tmp_path / "redis-server"
    binary = fake_binary(tmp_path)
    assert find_redis_server(str(tmp_path)) == binary


def test_otherwise_the_packaged_one_is_taken(tmp_path: Path) -> None:
    packaged = packaged_redis_server()
    assert packaged is not None
    assert packaged.is_file()
    assert find_redis_server(str(tmp_path)) == packaged


def test_without_either_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "packaged_redis_server", lambda: None)
    with pytest.raises(RedisMissing, match="--redis URL"):
        find_redis_server(str(tmp_path))


WAYS = ["packaged", pytest.param("path", marks=pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH"))]


@pytest.mark.parametrize("way", WAYS)
async def test_it_answers_runs_lua_and_stops(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "packaged":
        monkeypatch.setenv("PATH", str(tmp_path))
    async with supervise(tmp_path / "logs", 5.0) as supervisor, own_redis(supervisor) as url:
        assert await command(url, "PING") == b"+PONG"
        assert await command(url, "EVAL", "local t = redis.call('TIME'); redis.call('SET', KEYS[1], t[1]); return 7", "1", "k") == b":7"
        assert await command(url, "CONFIG", "GET", "save") == b"*2"
        port = int(url.rsplit(":", 1)[1].split("/")[0])
    assert not await redis_probe(port)()


async def test_the_probe_says_no_where_nobody_listens() -> None:
    [port] = free_ports("127.0.0.1", 1)
    assert not await redis_probe(port)()


def test_free_ports_are_different() -> None:
    assert len(set(free_ports("127.0.0.1", 20))) == 20
