"""The fleet that chaos is made in: a real Redis, backends and gateways, each a process, with proxies between them, and one fleet secret.

Every backend is reached through a proxy of its own (it advertises that proxy's address), and every process reaches Redis through one.
KV blocks go from engine to engine directly.
"""

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from backend.peers.signer import Signer
from backend.registry.redis import RedisStore
from backend.registry.store import StoreError
from bench.chaos.launcher import FleetLauncher
from bench.chaos.pace import Pace
from bench.chaos.process import Process
from bench.chaos.proxy import Proxy
from deploy.health import free_ports, http_probe, redis_probe
from deploy.launch.server import serving_here
from deploy.machine import Machine
from deploy.process import Program, supervise
from deploy.redis_server import find_redis_server, redis_command
from deploy.up import Model, UpOptions, backend_program, gateway_program

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
FREE_WITHIN_S = 30.0
"""After the last fault, until nothing is held anywhere: claims of dead gateways and pooled connections run out first."""
POLL_S = 0.05
ASK_S = 5.0


@dataclass(eq=False)
class BackendPart:
    """An engine with its llumlet, and the ways to it and from it."""

    id: str
    process: Process
    proxy: Proxy
    to_redis: Proxy

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.proxy.port}"


@dataclass(eq=False)
class GatewayPart:
    """A gateway and its way to Redis."""

    url: str
    process: Process
    to_redis: Proxy


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is still held although nothing runs."""

    claims: int
    slots: int
    blocks: int
    connections: int

    @property
    def any(self) -> bool:
        return any((self.claims, self.slots, self.blocks, self.connections))


@dataclass(eq=False)
class ChaosFleet:
    """Everything, started."""

    model: str
    redis: Process
    redis_port: int
    backends: Sequence[BackendPart]
    gateways: Sequence[GatewayPart]
    client: aiohttp.ClientSession
    signer: Signer
    pace: Pace
    block_tokens: int = 16
    counted: dict[tuple[int, str], float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> Sequence[Process]:
        return (self.redis, *(one.process for one in self.backends), *(one.process for one in self.gateways))

    async def mend(self) -> None:
        """Everything passes, runs and is ready in the eyes of both gateways."""
        for backend in self.backends:
            backend.to_redis.heal()
            backend.proxy.heal()
        for gateway in self.gateways:
            gateway.to_redis.heal()
        for process in self.processes:
            process.go_on()
            if not process.alive:
                await process.start()
        await until(self._is_ready, READY_WITHIN_S)

    async def _is_ready(self) -> bool:
        for gateway in self.gateways:
            known = json.loads(await self.ask(f"{gateway.url}/admin/instances"))["instances"]
            if {one["id"] for one in known if one["state"] == "ready"} != {backend.id for backend in self.backends}:
                return False
        return all([await self.ask(f"{backend.url}/health") is not None for backend in self.backends])

    async def ask(self, url: str, *, timeout_s: float = ASK_S) -> bytes:
        """What a GET is answered, signed as a member's. Raises OSError, aiohttp.ClientError."""
        signed = self.signer.sign("GET", url, (), b"")
        headers = {name.decode(): value.decode() for name, value in signed.headers}
        async with asyncio.timeout(timeout_s), self.client.get(url, headers=headers) as response:
            response.raise_for_status()
            return await response.read()

    async def operate(self, order: str, body: Mapping[str, object], turn: int) -> None:
        """Order a scaling operation, of the gateways in turn, and return when it is done. Raises TimeoutError, aiohttp.ClientError."""
        url = self.gateways[turn % len(self.gateways)].url
        async with asyncio.timeout(ASK_S), self.client.post(f"{url}/admin/{order}", json=body) as response:
            response.raise_for_status()
            operation = (await response.json())["operation"]

        async def is_done() -> bool:
            return bool(json.loads(await self.ask(f"{url}/admin/operations/{operation}"))["state"] == "done")

        await until(is_done, self.pace.start_timeout_s)

    async def count(self) -> None:
        """Add what the gateways' counters have gone up by since they were last looked at; a new process begins at 0."""
        for number, gateway in enumerate(self.gateways):
            try:
                text = (await self.ask(f"{gateway.url}/metrics", timeout_s=1.0)).decode()
            except (OSError, aiohttp.ClientError):
                continue
            for name, value in _counters(text).items():
                before = self.counted.get((number, name), 0.0)
                self.totals[name] = self.totals.get(name, 0.0) + (value - before if value >= before else value)
                self.counted[number, name] = value

    async def leaks(self) -> Leaks:
        """What is still held once it has had the time to go away."""

        async def is_free() -> bool:
            return not (await self._look()).any

        with suppress(TimeoutError):
            await until(is_free, FREE_WITHIN_S)
        return await self._look()

    async def _look(self) -> Leaks:
        slots = tokens = 0
        for backend in self.backends:
            load = json.loads(await self.ask(f"{backend.url}/midstream/load"))
            rows = json.loads(await self.ask(f"{backend.url}/midstream/requests"))["requests"]
            slots += sum(int(load[name]) for name in ("running", "waiting", "migrations_in", "migrations_out")) + len(rows)
            tokens += int(load["capacity_tokens"]) - int(load["free_tokens"])
        store = RedisStore(f"redis://{HOST}:{self.redis_port}/0")
        try:
            claims = len(await store.claims())
        finally:
            await store.close()
        return Leaks(claims, slots, -(-tokens // self.block_tokens), sum(backend.proxy.open for backend in self.backends))


def _counters(text: str) -> dict[str, float]:
    """Streams that moved, were resumed, and were retried, as one gateway has counted them."""
    found = {"moved": 0.0, "resumed": 0.0, "retried": 0.0}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == "midstream_gateway_switches_total":
            found["moved"] += float(value)
        elif name.startswith("midstream_gateway_retries_total"):
            found["retried"] += float(value)
        elif name.startswith("midstream_gateway_resumes_total") and '"resumed"' in name:
            found["resumed"] += float(value)
    return found


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait for a condition on other processes; while one does not answer it is not fulfilled."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if await condition():
                    return
            except (OSError, aiohttp.ClientError, StoreError):
                pass
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_fleet(
    logs: Path,
    options: UpOptions,
    model: Model,
    *,
    gateways: int,
    pace: Pace,
) -> AsyncIterator[ChaosFleet]:
    """Start everything; stop it on leaving."""
    redis_port, *ports = free_ports(HOST, 1 + options.instances + gateways)
    secret = secrets.token_hex(32)
    shared = {"MIDSTREAM_FLEET_SECRET": secret}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-redis-")))
        client = await stack.enter_async_context(_client())
        proxies = [await stack.enter_async_context(Proxy(HOST, redis_port)) for _ in ports]
        fronts = [await stack.enter_async_context(Proxy(HOST, port)) for port in ports[: options.instances]]
        supervisor = await stack.enter_async_context(supervise(logs, stop_timeout_s=15.0))

        def process(program: Program, more: Mapping[str, str], url: str) -> Process:
            program = replace(program, environment={**program.environment, **shared, **more})
            return Process(program, supervisor, http_probe(f"{url}/health"), pace.start_timeout_s)

        redis_program = Program("redis", redis_command(find_redis_server(), redis_port, directory))
        redis = Process(redis_program, supervisor, redis_probe(redis_port), pace.start_timeout_s)
        machine = Machine.look(None)
        backends = []
        for index, (port, front, to_redis) in enumerate(zip(ports, fronts, proxies, strict=False)):
            program = backend_program(index, port, options, model, _redis_url(to_redis), machine)
            command = (*_advertising(program.command, f"http://{HOST}:{front.port}"), *pace.arguments)
            program = replace(program, command=command)
            backends.append(BackendPart(f"i{index + 1}", process(program, pace.backend, f"http://{HOST}:{port}"), front, to_redis))
        launcher = FleetLauncher(model.served_as, {one.id: one.process for one in backends})
        of_gateways = {**pace.gateway, **await stack.enter_async_context(serving_here(launcher))}
        fronts_of_gateways = []
        for index, (port, to_redis) in enumerate(zip(ports[options.instances :], proxies[options.instances :], strict=True)):
            program = gateway_program(replace(options, host=HOST, port=port), _redis_url(to_redis))
            program = replace(program, name=f"gateway-{index + 1}")
            fronts_of_gateways.append(
                GatewayPart(f"http://{HOST}:{port}", process(program, of_gateways, f"http://{HOST}:{port}"), to_redis)
            )
        signer = Signer((secret.encode(),))
        fleet = ChaosFleet(model.served_as, redis, redis_port, backends, fronts_of_gateways, client, signer, pace)
        await redis.start()
        for one in fleet.processes[1:]:
            await one.start()
        await fleet.mend()
        yield fleet


def _client() -> aiohttp.ClientSession:
    """Keeps no connection: those to backends are counted."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    )


def _redis_url(proxy: Proxy) -> str:
    return f"redis://{HOST}:{proxy.port}/0"


def _advertising(command: tuple[str, ...], url: str) -> tuple[str, ...]:
    at = command.index("--advertised-url") + 1
    return (*command[:at], url, *command[at + 1 :])
