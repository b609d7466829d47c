"""A real gateway on a real port, in front of scripted backends."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from backend.registry.instance import InstanceState, LoadReport
from backend.registry.memory import MemoryStore
from backend.registry.store import InstanceStore
from gateway.app import build_app
from gateway.protocol import bounded_protocol
from gateway.settings import GatewaySettings
from tests.backend.registry.reports import a_report
from tests.gateway.scripted import ScriptedBackend, scripted_backend

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def report(
    instance: str,
    url: str = "http://127.0.0.1:9",
    state: InstanceState = InstanceState.READY,
    models: tuple[str, ...] = ("m",),
    running: int = 0,
) -> LoadReport:
    return a_report(instance, url=url, state=state, models=models, running=running, max_batch=64)


class Server(uvicorn.Server):
    """Leaves the test process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def live(app: Any, http: Any = "httptools") -> AsyncIterator[str]:
    """The app on an ephemeral port; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=http, lifespan="on", log_config=None, timeout_graceful_shutdown=2)
        server = Server(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            await until(lambda: server.started)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within_s: float = 5.0) -> None:
    """Wait for a condition; fail if it does not come true in time."""
    async with asyncio.timeout(within_s):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.002)


async def until_still(count: Callable[[], int]) -> None:
    """Wait until nothing is added any more."""
    before = -1
    while before != count():
        before = count()
        await asyncio.sleep(0.2)


@dataclass(eq=False)
class Rig:
    """A gateway, its store and its backends."""

    url: str
    store: InstanceStore
    client: httpx.AsyncClient
    stack: AsyncExitStack
    backends: list[ScriptedBackend] = field(default_factory=list)

    async def add(
        self, name: str, running: int = 0, state: InstanceState = InstanceState.READY, models: tuple[str, ...] = ("m",)
    ) -> ScriptedBackend:
        """A backend that is known to the gateway. Those with more running requests are chosen later."""
        backend = await self.stack.enter_async_context(scripted_backend(name))
        await self.store.publish(report(name, backend.url, state, models, running), ttl_s=1000)
        self.backends.append(backend)
        return backend

    async def ask(self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        return await self.client.post(path, json={**BODY, **fields}, headers=headers)

    @asynccontextmanager
    async def reading(self, **fields: object) -> AsyncIterator[httpx.Response]:
        """An open stream; leaving closes the client's connection."""
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=10) as client,
            client.stream("POST", "/v1/chat/completions", json={**BODY, **fields}) as response,
        ):
            yield response

    async def quiet(self) -> None:
        """Wait until nothing is left of any request: no claim, no connection to any backend."""

        async def is_quiet() -> bool:
            return not await self.store.claims() and not any(backend.open for backend in self.backends)

        await until(is_quiet, within_s=1.0)

    async def metric(self, line: str) -> bool:
        return line in (await self.client.get("/metrics")).text.splitlines()


RigMaker = Callable[..., AbstractAsyncContextManager[Rig]]


@asynccontextmanager
async def make_rig(store: InstanceStore | None = None, **settings: Any) -> AsyncIterator[Rig]:
    store = store or MemoryStore(asyncio.get_running_loop().time)
    usual = {"_env_file": None, "keepalive_interval_s": 0, "rebalance": False, "resume_wait_s": 0.1}
    knobs = GatewaySettings(**{**usual, **settings})
    app = build_app(knobs, store)
    async with live(app, bounded_protocol(knobs)) as url, httpx.AsyncClient(base_url=url, timeout=10) as client, AsyncExitStack() as stack:
        yield Rig(url, store, client, stack)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with make_rig() as made:
        yield made


@asynccontextmanager
async def impatient_server(rig: Rig) -> AsyncIterator[list[bytes]]:
    """An instance that promises to keep each connection, and closes it as soon as it has answered, or at the next request. Heads it got."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            heads.append(head)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
            if len(heads) % 2:
                await reader.read(1)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await rig.store.publish(report("k", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), ttl_s=1000)
        yield heads
