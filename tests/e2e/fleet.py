"""A whole product on this machine, each part a process of its own that a test may kill, hang and start again: a real Redis, backends and a
gateway, with the command lines of `midstream up`."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from backend.registry.redis import RedisStore
from backend.registry.store import StoreError
from deploy.health import Probe, free_ports, http_probe, redis_probe
from deploy.machine import Machine
from deploy.process import Child, Program, Supervisor, supervise
from deploy.redis_server import find_redis_server, redis_command
from deploy.up import Model, UpOptions, backend_program, gateway_program
from tests.e2e.answers import Answer

T = TypeVar("T")

HOST = "127.0.0.1"
POLL_S = 0.004
REACHED_WITHIN_S = 20.0
"""A moment of a scenario: longer than any of them takes to come, so that a test fails instead of hanging."""
SETTLED_WITHIN_S = 15.0
"""After a fault, until nothing is held anywhere: what a dead gateway claimed has to run out first, for one thing."""


@dataclass(eq=False)
class Part:
    """One process of the fleet."""

    program: Program
    supervisor: Supervisor
    probe: Probe
    start_timeout_s: float
    child: Child | None = None
    starts: int = 0
    hung: bool = False

    @property
    def pid(self) -> int:
        assert self.child is not None, f"{self.program.name} was not started"
        return self.child.process.pid

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.process.returncode is None

    async def start(self) -> None:
        """Start it (again, with the same command); return once it is healthy."""
        self.starts += 1
        name = self.program.name if self.starts == 1 else f"{self.program.name}-{self.starts}"
        self.child = await self.supervisor.start(replace(self.program, name=name))
        await self.supervisor.wait_healthy(self.child, self.probe, self.start_timeout_s)

    async def kill(self) -> None:
        """SIGKILL, for its whole process group; returns when it is gone."""
        os.killpg(self.pid, signal.SIGKILL)
        await self.ended()
        self.hung = False

    async def ended(self) -> None:
        """Return when its process has ended, of which the supervisor is to think nothing."""
        assert self.child is not None
        self.child.stopping = True
        await self.child.process.wait()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """SIGSTOP while it lasts: its sockets stay open, and nobody answers."""
        os.killpg(self.pid, signal.SIGSTOP)
        self.hung = True
        try:
            yield
        finally:
            if self.alive:
                os.killpg(self.pid, signal.SIGCONT)
                self.hung = False


@dataclass(eq=False)
class Backend:
    """An engine with its llumlet."""

    id: str
    url: str
    part: Part
    client: httpx.AsyncClient
    free_tokens: int = 0
    """Of the idle engine."""

    async def load(self) -> dict[str, Any]:
        return dict((await self.client.get(f"{self.url}/midstream/load")).json())

    async def requests(self) -> list[dict[str, Any]]:
        """What it serves right now."""
        return list((await self.client.get(f"{self.url}/midstream/requests")).json()["requests"])

    async def find(self, request: str) -> dict[str, Any]:
        """That request as it stands here; empty if it is not here. Of several stays, the latest."""
        rows = [row for row in await self.requests() if row["request"] == request]
        return max(rows, key=lambda row: int(row["epoch"]), default={})

    async def is_idle(self) -> bool:
        """Nothing runs, nothing waits, nothing is held for anyone."""
        load = await self.load()
        quiet = not (load["running"] or load["waiting"] or load["migrations_in"] or load["migrations_out"])
        return quiet and load["free_tokens"] == self.free_tokens and not await self.requests()


@dataclass(eq=False)
class Fleet:
    """Everything, started. `mend` it before each use."""

    gateway_url: str
    redis_url: str
    model: str
    redis: Part
    gateway: Part
    backends: Sequence[Backend]
    client: httpx.AsyncClient
    asked: int = 0

    @property
    def parts(self) -> Sequence[Part]:
        return (self.redis, *(backend.part for backend in self.backends), self.gateway)

    def other(self, backend: Backend) -> Backend:
        return next(one for one in self.backends if one is not backend)

    def living(self) -> Sequence[Backend]:
        return [backend for backend in self.backends if backend.part.alive and not backend.part.hung]

    # ---- state of the fleet

    async def mend(self) -> None:
        """Start what is dead; return when every instance is idle and ready in the gateway's eyes."""
        for part in self.parts:
            if not part.alive:
                await part.start()
        await until(self._is_ready, SETTLED_WITHIN_S)
        for backend in self.backends:
            backend.free_tokens = backend.free_tokens or (await backend.load())["capacity_tokens"]
        await self.settle()

    async def _is_ready(self) -> bool:
        known = (await self.client.get(f"{self.gateway_url}/admin/instances")).json()["instances"]
        told = {one["id"]: one for one in known if one["state"] == "ready"}
        if told.keys() != {backend.id for backend in self.backends}:
            return False
        loads = [await backend.load() for backend in self.backends]
        # What it knows may be the last word of one that died.
        return all(told[load["instance"]]["free_tokens"] == load["free_tokens"] for load in loads)

    async def settle(self) -> None:
        """Return when nothing is left of any request: no flight, no held memory on any living instance, no claim."""
        await until(self._is_settled, SETTLED_WITHIN_S)

    async def _is_settled(self) -> bool:
        if not all([await backend.is_idle() for backend in self.living()]):
            return False
        return not self.redis.alive or not await self.claims()

    async def claims(self) -> int:
        """Claims of all gateways in the store."""
        store = RedisStore(self.redis_url)
        try:
            return len(await store.claims())
        finally:
            await store.close()

    async def live_at_gateway(self) -> int:
        """Requests the gateway itself believes to serve."""
        text = (await self.client.get(f"{self.gateway_url}/metrics")).text
        return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith("midstream_gateway_live_requests "))

    # ---- requests

    def next_request(self) -> str:
        """An id never used before, of the same length as all others."""
        self.asked += 1
        return f"run-{self.asked:06d}"

    async def read(self, answer: Answer, path: str, body: Mapping[str, Any], url: str | None = None) -> None:
        """Send the request and note what comes, until it ends or breaks."""
        headers = {"x-request-id": answer.request}
        try:
            async with self.client.stream(
                "POST", (url or self.gateway_url) + path, json={"model": self.model, **body}, headers=headers
            ) as got:
                answer.status, answer.headers = got.status_code, got.headers
                async for chunk in got.aiter_raw():
                    answer.body += chunk
            answer.whole = True
        except httpx.TransportError as error:
            answer.failure = repr(error)

    async def ask(self, path: str, body: Mapping[str, Any], url: str | None = None) -> Answer:
        """The whole answer to a request that nobody disturbs."""
        answer = Answer(self.next_request())
        await self.read(answer, path, body, url)
        assert answer.whole, answer.failure
        return answer

    async def locate(self, request: str, output_tokens: int) -> Backend:
        """Where the request runs, once it has that many output tokens."""

        async def look() -> Backend | None:
            for backend in self.living():
                row = await backend.find(request)
                if row and row["state"] != "arriving" and row["output_tokens"] >= output_tokens:
                    return backend
            return None

        return await found(look, REACHED_WITHIN_S)

    async def move(self, request: str, destination: str | None = None, mode: str = "live") -> dict[str, Any]:
        """POST /admin/migrations; its answer and `status`. Status 0 if the gateway went away."""
        order = {"request": request, "mode": mode, **({"destination": destination} if destination else {})}
        try:
            response = await self.client.post(f"{self.gateway_url}/admin/migrations", json=order)
        except httpx.TransportError as error:
            return {"status": 0, "error": repr(error)}
        return {"status": response.status_code, **response.json()}


async def until(condition: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Wait for a condition on other processes; those that do not answer at the moment do not fulfil it."""
    await found(condition, seconds)


async def found(look: Callable[[], Awaitable[T | None]], seconds: float) -> T:
    """The first true thing that `look` answers."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if seen := await look():
                    return seen
            except (httpx.TransportError, StoreError):
                pass
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_fleet(
    logs: Path,
    options: UpOptions,
    model: Model,
    *,
    arguments: Sequence[str] = (),
    backend_environment: Mapping[str, str],
    gateway_environment: Mapping[str, str],
    at_once: bool = True,
    start_timeout_s: float = 120.0,
) -> AsyncIterator[Fleet]:
    """Start everything, backends all at once or one after the other; stop it again. `arguments` are added to those for vLLM."""
    ports = free_ports(HOST, options.instances + 2)
    redis_port, gateway_port, *backend_ports = ports
    redis_url, gateway_url = f"redis://{HOST}:{redis_port}/0", f"http://{HOST}:{gateway_port}"
    options = replace(options, host=HOST, port=gateway_port)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-redis-")))
        supervisor = await stack.enter_async_context(supervise(logs, stop_timeout_s=10.0))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))

        def part(program: Program, environment: Mapping[str, str], probe: Probe) -> Part:
            program = replace(program, environment={**program.environment, **environment})
            return Part(program, supervisor, probe, start_timeout_s)

        redis = part(Program("redis", redis_command(find_redis_server(), redis_port, directory)), {}, redis_probe(redis_port))
        machine = Machine.look(None)
        backends = []
        for index, port in enumerate(backend_ports):
            program = backend_program(index, port, options, model, redis_url, machine)
            program = replace(program, command=(*program.command, *arguments))
            url = f"http://{HOST}:{port}"
            backends.append(Backend(f"i{index + 1}", url, part(program, backend_environment, http_probe(f"{url}/health")), client))
        gateway = part(gateway_program(options, redis_url), gateway_environment, http_probe(f"{gateway_url}/health"))
        await redis.start()
        async with asyncio.TaskGroup() as starting:
            starting.create_task(gateway.start())
            for backend in backends:
                task = starting.create_task(backend.part.start())
                if not at_once:
                    await asyncio.wait([task])
        fleet = Fleet(gateway_url, redis_url, model.served_as, redis, gateway, backends, client)
        await fleet.mend()
        yield fleet
