"""Real engines, and in front of them one gateway after the other: so that settings are compared on the very same engines, in turns."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from backend.peers.environment import read_or_exit
from deploy.health import free_ports, http_probe
from deploy.machine import Machine
from deploy.process import Supervisor, supervise
from deploy.settings import DeploySettings
from deploy.up import GATEWAY_START_TIMEOUT_S, Model, UpOptions, backend_program, choose_model, gateway_program, shared_store

HOST = "127.0.0.1"
POLL_S = 0.05
WAYS: Mapping[str, Mapping[str, str]] = {
    "midstream": {"MIDSTREAM_POLICY": "midstream"},
    "midstream, migration off": {"MIDSTREAM_POLICY": "midstream", "MIDSTREAM_REBALANCE": "false"},
    "round_robin": {"MIDSTREAM_POLICY": "round_robin", "MIDSTREAM_REBALANCE": "false"},
}
"""What is compared: the product as it is, without moving, and the simplest that people use. Environments of a gateway."""


@dataclass(frozen=True, slots=True)
class Arena:
    """The engines. `backends` maps instance ids to URLs."""

    redis_url: str
    backends: Mapping[str, str]
    model: str
    engine: str
    logs: Path
    stop_timeout_s: float

    @asynccontextmanager
    async def gateway(self, environment: Mapping[str, str]) -> AsyncIterator[str]:
        """A gateway with these settings, which sees all engines, while it lasts; its URL."""
        options = UpOptions(engine=self.engine, host=HOST, port=free_ports(HOST, 1)[0])
        program = gateway_program(options, self.redis_url)
        program = replace(program, environment={**program.environment, **environment})
        url = f"http://{HOST}:{options.port}"
        async with supervise(self.logs / f"gateway-{options.port}", self.stop_timeout_s) as supervisor:
            child = await supervisor.start(program)
            with redirect_stdout(sys.stderr):
                await supervisor.wait_healthy(child, http_probe(f"{url}/health"), GATEWAY_START_TIMEOUT_S)
            await self._wait_seen(url)
            yield url

    async def _wait_seen(self, url: str) -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            while True:
                listed = (await client.get(f"{url}/admin/instances")).json()["instances"]
                if len(listed) >= len(self.backends) and all(one["state"] == "ready" for one in listed):
                    return
                await asyncio.sleep(POLL_S)

    async def wait_idle(self, client: httpx.AsyncClient) -> None:
        """Until nothing runs, waits or moves on any engine."""
        for url in self.backends.values():
            while True:
                load = (await client.get(f"{url}/midstream/load")).json()
                if not (load["running"] or load["waiting"] or load["migrations_in"] or load["migrations_out"]):
                    break
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_arena(
    options: UpOptions, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[Arena]:
    """Start Redis and the engines, telling standard error how far it is; stop them on leaving. `arguments` are vLLM's, for each."""
    settings = read_or_exit(DeploySettings)
    logs = settings.logs / "bench"
    with redirect_stdout(sys.stderr):
        model: Model = await asyncio.to_thread(choose_model, options, settings)
        async with (
            supervise(logs, settings.stop_timeout_s) as supervisor,
            shared_store(options, settings, supervisor) as redis_url,
        ):
            backends = await _start(options, settings, model, redis_url, supervisor, arguments, environment or {})
            yield Arena(redis_url, backends, model.served_as, options.engine, logs, settings.stop_timeout_s)


async def _start(
    options: UpOptions,
    settings: DeploySettings,
    model: Model,
    redis_url: str,
    supervisor: Supervisor,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> dict[str, str]:
    machine = Machine.look(settings.visible_gpus)
    urls: dict[str, str] = {}
    async with asyncio.TaskGroup() as group:
        for index, port in enumerate(free_ports(HOST, options.instances)):
            program = backend_program(index, port, options, model, redis_url, machine)
            more = tuple(arguments) if options.engine == "vllm" else ()
            program = replace(program, command=(*program.command, *more), environment={**program.environment, **environment})
            child = await supervisor.start(program)
            urls[f"i{index + 1}"] = url = f"http://{HOST}:{port}"
            group.create_task(supervisor.wait_healthy(child, http_probe(f"{url}/health"), settings.start_timeout_s))
    return urls
