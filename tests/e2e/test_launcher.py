"""`midstream launcher` as a process: a gateway has it start a backend; it is killed, and the next one knows the backend and stops it."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deploy.health import free_ports, http_probe, redis_probe
from deploy.process import Child, Program, Supervisor, supervise
from deploy.redis_server import find_redis_server, redis_command
from deploy.up import UpOptions, gateway_program
from tests.e2e.fleet import HOST, until
from tests.e2e.test_scale_out import READY_WITHIN_S, Up

pytestmark = pytest.mark.timeout(300)

TOKEN = "launch-secret"


class Launching:
    """The launcher's process, which may be killed and started again."""

    def __init__(self, supervisor: Supervisor, home: Path, port: int, redis_url: str) -> None:
        self._supervisor = supervisor
        self._url = f"http://{HOST}:{port}"
        command = (sys.executable, "-m", "deploy.cli", "launcher", "--engine", "fake", "--port", str(port), "--redis", redis_url)
        self._command = command
        self._environment = {"MIDSTREAM_HOME": str(home), "MIDSTREAM_LAUNCHER_TOKEN": TOKEN}
        self._starts = 0

    async def start(self) -> Child:
        self._starts += 1
        child = await self._supervisor.start(Program(f"launcher-{self._starts}", self._command, 1, self._environment, vital=False))
        await self._supervisor.wait_healthy(child, http_probe(f"{self._url}/health"), READY_WITHIN_S)
        return child


@asynccontextmanager
async def everything(home: Path) -> AsyncIterator[tuple[Up, Launching]]:
    redis_port, gateway_port, launcher_port = free_ports(HOST, 3)
    redis_url = f"redis://{HOST}:{redis_port}/0"
    environment = {"MIDSTREAM_LAUNCHER_URL": f"http://{HOST}:{launcher_port}", "MIDSTREAM_LAUNCHER_TOKEN": TOKEN}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-redis-")))
        supervisor = await stack.enter_async_context(supervise(home / "logs", stop_timeout_s=10.0))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        redis = await supervisor.start(Program("redis", redis_command(find_redis_server(), redis_port, directory)))
        await supervisor.wait_healthy(redis, redis_probe(redis_port), READY_WITHIN_S)
        gateway = await supervisor.start(gateway_program(UpOptions(host=HOST, port=gateway_port), redis_url, environment))
        await supervisor.wait_healthy(gateway, http_probe(f"http://{HOST}:{gateway_port}/health"), READY_WITHIN_S)
        yield Up(f"http://{HOST}:{gateway_port}", client), Launching(supervisor, home, launcher_port, redis_url)


def backends_under(home: Path) -> set[int]:
    """Processes that the notes of the launcher name, and that are there."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*"):
        try:
            environment = (stat / "environ").read_bytes()
            command = (stat / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"MIDSTREAM_HOME={home}".encode() in environment.split(b"\0") and b"backend" in command:
            found.add(int(stat.name))
    return found


async def test_a_backend_outlives_its_launcher_and_is_stopped_by_the_next(tmp_path: Path) -> None:
    try:
        async with everything(tmp_path) as (up, launching):
            launcher = await launching.start()
            grown = await up.wait_over(await up.order("scale-out", count=1))
            (instance,) = [one["instance"] for one in grown["instances"]]
            assert await up.ready() == {instance}
            (backend,) = backends_under(tmp_path)

            os.kill(launcher.process.pid, signal.SIGKILL)
            await launcher.process.wait()
            refused = await up.client.post(f"{up.url}/admin/scale-in", json={"instance": instance})
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, "launcher_failed")
            # An order to start needs nobody at once: it waits for the launcher.
            waiting = await up.order("scale-out", count=1)
            body = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            assert (await up.client.post(f"{up.url}/v1/chat/completions", json=body)).status_code == 200

            await launching.start()
            assert backends_under(tmp_path) >= {backend}
            assert (await up.wait_over(waiting))["state"] == "done"
            shrunk = await up.wait_over(await up.order("scale-in", instance=instance))
            assert shrunk["state"] == "done"
            await until(lambda: asyncio.sleep(0, backend not in backends_under(tmp_path)), READY_WITHIN_S)
            assert instance not in await up.ready()
    finally:
        for left in backends_under(tmp_path):
            os.kill(left, signal.SIGKILL)
