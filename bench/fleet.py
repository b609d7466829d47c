"""A real fleet for a benchmark: Redis, two backends and a gateway as processes of their own, as `midstream up` starts them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace

import httpx

from backend.peers.environment import read_or_exit
from deploy.health import free_ports, http_probe
from deploy.process import supervise
from deploy.settings import DeploySettings
from deploy.up import GATEWAY_START_TIMEOUT_S, Model, UpOptions, choose_model, gateway_program, shared_store, start_backends


@dataclass(frozen=True, slots=True)
class BenchFleet:
    """Where things are. `backends` maps instance ids to URLs."""

    gateway: str
    backends: dict[str, str]
    model: str
    engine: str


@asynccontextmanager
async def open_fleet(options: UpOptions) -> AsyncIterator[BenchFleet]:
    """Start it, telling standard error how far it is; stop it on leaving."""
    settings = read_or_exit(DeploySettings)
    options = replace(options, port=free_ports(options.host, 1)[0])
    with redirect_stdout(sys.stderr):
        model: Model = await asyncio.to_thread(choose_model, options, settings)
        async with (
            supervise(settings.logs / "bench", settings.stop_timeout_s) as supervisor,
            shared_store(options, settings, supervisor) as redis_url,
        ):
            await start_backends(options, settings, model, redis_url, supervisor)
            program = gateway_program(options, redis_url)
            # A benchmark orders its moves itself.
            program = replace(program, environment={**program.environment, "MIDSTREAM_REBALANCE": "false"})
            gateway = await supervisor.start(program)
            url = f"http://{options.host}:{options.port}"
            await supervisor.wait_healthy(gateway, http_probe(f"{url}/health"), GATEWAY_START_TIMEOUT_S)
            yield await _look(url, model.served_as)


async def _look(url: str, model: str) -> BenchFleet:
    async with httpx.AsyncClient(timeout=10) as client:
        while True:
            listed = (await client.get(f"{url}/admin/instances")).json()["instances"]
            if len(listed) >= 2 and all(one["state"] == "ready" for one in listed):
                return BenchFleet(url, {one["id"]: one["url"] for one in listed}, model, listed[0]["engine"])
            await asyncio.sleep(0.1)
