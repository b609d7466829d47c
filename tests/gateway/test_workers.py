"""Several workers behind one port: all serve, the dead are replaced, metrics are those of all, and nobody outlives the supervisor."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bench.process_tree import tree
from deploy.health import free_ports
from gateway.settings import GatewaySettings
from gateway.workers import NotShared, supervise
from tests.backend.registry.conftest import redis_url
from tests.gateway.conftest import until
from tests.gateway.passive.plain import ANSWER, plain_server
from tests.gateway.scripted import Exchange

__all__ = ["redis_url"]

BODY = {"model": "m", "messages": [], "stream": True}


def test_workers_need_a_shared_store() -> None:
    with pytest.raises(NotShared):
        supervise(GatewaySettings(_env_file=None, workers=2, redis_url="memory://"))
    with pytest.raises(NotShared):
        supervise(GatewaySettings(_env_file=None, workers=2, backends=("http://127.0.0.1:9",)))


def workers_of(supervisor: int) -> set[int]:
    return {pid for pid in tree(supervisor) if pid != supervisor and "--fd" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _command(pid)}


@asynccontextmanager
async def supervised(redis: str, backend: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    [port] = free_ports("127.0.0.1", 1)
    flags = ("--workers", "2", "--port", str(port), "--redis", redis, "--backend", backend)
    environment = {**os.environ, "MIDSTREAM_SHUTDOWN_GRACE_S": "1", "MIDSTREAM_LOG_LEVEL": "warning"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *flags, env=environment)
    url = f"http://127.0.0.1:{port}"

    async def is_up() -> bool:
        try:
            async with httpx.AsyncClient(timeout=5) as client:
                return len(workers_of(process.pid)) == 2 and (await client.get(f"{url}/health")).json()["instances"] == 1
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    try:
        await until(is_up, within_s=40)
        yield process, url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ask(url: str) -> bytes:
    """Each on a connection of its own, so that any worker may get it."""
    async with httpx.AsyncClient(timeout=20) as client:
        return (await client.post(f"{url}/v1/chat/completions", json=BODY)).content


async def _counts(url: str, answers: int) -> bool:
    """Whether all workers together have counted so many; each is counted just after its client has it."""
    async with httpx.AsyncClient(timeout=20) as client:
        text = (await client.get(f"{url}/metrics")).text
    return re.findall(r'requests_total\{outcome="ok",tier="normal"\} (\d+)', text) == [str(answers)]


@pytest.mark.timeout(120)
async def test_dead_workers_are_replaced_and_metrics_are_those_of_all(redis_url: str) -> None:
    held = asyncio.Event()

    async def holds(exchange: Exchange) -> None:
        await held.wait()
        await exchange.stream(ANSWER)

    async with plain_server() as plain, supervised(redis_url, plain.url) as (supervisor, url):
        plain.backend.script = holds
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_ask(url)) for _ in range(12)]
            await until(lambda: len(plain.backend.asked("/v1/chat")) == 12, within_s=20)
            async with httpx.AsyncClient(timeout=20) as client:
                for _ in range(4):
                    assert "midstream_gateway_live_requests 12.0" in (await client.get(f"{url}/metrics")).text
            held.set()
        assert [task.result() for task in asked] == [ANSWER] * 12
        await until(lambda: _counts(url, 12), within_s=20)
        before = workers_of(supervisor.pid)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(workers_of(supervisor.pid) - {victim}) == 2, within_s=20)
        for _ in range(6):
            assert await _ask(url) == ANSWER
        await until(lambda: _counts(url, 18), within_s=20)
        left = workers_of(supervisor.pid)
        supervisor.terminate()
        assert await asyncio.wait_for(supervisor.wait(), 20) == 0
        assert not alive(left)


@pytest.mark.timeout(120)
async def test_workers_do_not_outlive_a_supervisor_that_is_killed(redis_url: str) -> None:
    async with plain_server() as plain, supervised(redis_url, plain.url) as (supervisor, _):
        left = workers_of(supervisor.pid)
        supervisor.kill()
        await supervisor.wait()
        await until(lambda: not alive(left), within_s=20)
