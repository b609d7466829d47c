"""A real uvicorn on an ephemeral port, in the test's own loop; and a client that reads event streams."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.types import ASGIApp

from backend.llumlet.app import BackendApp, build
from backend.llumlet.arrival import Arrivals
from backend.llumlet.exchange import Exchange
from backend.llumlet.settings import LlumletSettings
from backend.registry.memory import MemoryStore
from migration.leg import RequestId
from tests.backend.llumlet.scripted_engine import CHAT, ScriptedEngine

DEADLINE_S = 10.0
CHAT_STREAM = b'{"model":"scripted","stream":true,"messages":[]}'
CHAT_PLAIN = b'{"model":"scripted","stream":false,"messages":[]}'


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # pytest's own handlers stay


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.serve(sockets=[listener]))
        await wait_until(lambda: server.started or task.done())
        try:
            yield
        finally:
            server.should_exit = True


async def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.002)


class Backend:
    """A llumlet in front of a scripted engine, being served."""

    def __init__(self, engine: ScriptedEngine, app: BackendApp, store: MemoryStore, url: str, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.app = app
        self.store = store
        self.url = url
        self.client = client
        self.stopped = asyncio.Event()

    @asynccontextmanager
    async def chat(self, body: bytes = CHAT_STREAM, *, request: str | None = "R", epoch: int = 0) -> AsyncIterator["Reader"]:
        """POST a chat, as a gateway does, or, without a request id, as anybody."""
        headers = {"content-type": "application/json"}
        if request is not None:
            headers |= {"x-midstream-request": request, "x-midstream-epoch": str(epoch), "x-midstream-tier": "high"}
        async with self.client.stream("POST", f"{self.url}{CHAT}", content=body, headers=headers) as response:
            yield Reader(response)

    @asynccontextmanager
    async def attach(self, request: str, epoch: int) -> AsyncIterator["Reader"]:
        async with self.client.stream("GET", f"{self.url}/midstream/streams/{request}?epoch={epoch}") as response:
            yield Reader(response)

    @property
    def arrivals(self) -> Arrivals:
        assert self.app.arrivals is not None
        return self.app.arrivals

    def exchange(self, request: str) -> Exchange:
        """The exchange that serves it."""
        exchange = self.app.flights.latest(RequestId(request))
        assert exchange is not None
        return exchange

    async def requests(self) -> list[dict[str, object]]:
        answer: dict[str, list[dict[str, object]]] = (await self.client.get(f"{self.url}/midstream/requests")).json()
        return answer["requests"]


class Reader:
    """Reads an answer's bytes up to what a test waits for."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self._bytes = response.aiter_raw()
        self.text = b""

    async def until(self, ending: bytes) -> bytes:
        """Everything from the beginning, once it ends so."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.text.endswith(ending):
                self.text += await anext(self._bytes)
        return self.text

    async def next(self) -> bytes:
        """The next bytes that come."""
        async with asyncio.timeout(DEADLINE_S):
            return await anext(self._bytes)

    async def rest(self) -> bytes:
        """Everything from the beginning to the end of the answer. Raises httpx.RemoteProtocolError if it was cut."""
        async with asyncio.timeout(DEADLINE_S):
            async for data in self._bytes:
                self.text += data
        return self.text


@asynccontextmanager
async def running_backend(**knobs: object) -> AsyncIterator[Backend]:
    """A backend with these settings, and everything about it closed at the end."""
    engine = ScriptedEngine()
    store = MemoryStore(asyncio.get_running_loop().time)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = LlumletSettings.model_validate({"instance_id": "i1", "advertised_url": url, **knobs})
    async with httpx.AsyncClient(timeout=DEADLINE_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        app = build(engine, settings, store, stop=lambda: backend.stopped.set())
        backend = Backend(engine, app, store, url, client)
        async with serving(app, listener):
            yield backend
