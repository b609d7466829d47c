"""An engine whose every token is said by the test, behind a small OpenAI-like app with real Starlette responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from backend.engine.flight import Flight, current_flight
from backend.registry.instance import LoadReport
from migration.errors import RequestEnded
from migration.leg import InstanceId, Leg
from migration.messages import ChannelOffer, KVLayout, TokenStep
from migration.ports import Frozen, Progress
from tests.backend.registry.reports import a_report

CHAT = "/v1/chat/completions"
LAYOUT = KVLayout(model="scripted", dtype="u8", block_tokens=4, block_bytes=8, layers=1, ranks=1, shape="1")
Part = bytes | int | Exception | None
"""What a test feeds: raw bytes to send as one body message, a token, what the handler raises, or the end."""
Handler = Callable[[Request], Awaitable[Response]]


def event(text: str, created: int = 100) -> bytes:
    """A chunk as the scripted server writes it."""
    chunk = {"id": "chatcmpl-R", "object": "chat.completion.chunk", "created": created, "choices": [{"delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


class ScriptedEngine:
    """Implements backend.engine.base.Engine. Each POST to CHAT runs `handler`, by default one that streams what `feed` gets."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[Part] = asyncio.Queue()
        self.handler: Handler = self.answer
        self.created = 100
        self.flights: dict[Leg, Flight] = {}
        self.closed: list[Leg] = []
        self.started = asyncio.Event()
        """A handler runs."""
        self.cancelled = asyncio.Event()
        """A handler's generator was closed before its end."""
        self.seen: list[Flight | None] = []
        self.load_changed: Callable[[bool], None] = lambda urgent: None

    def feed(self, *parts: Part) -> None:
        for part in parts:
            self.parts.put_nowait(part)

    # the server

    @property
    def movable_paths(self) -> frozenset[str]:
        return frozenset({CHAT})

    @property
    def openai_app(self) -> ASGIApp:
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["path"] != CHAT:
            await JSONResponse({"path": scope["path"], "body": (await request.body()).decode()})(scope, receive, send)
            return
        self.seen.append(current_flight.get())
        response = await self.handler(request)
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        flight = current_flight.get()
        if flight is not None:
            flight.prompt_tokens = 5
            flight.shell.set()
        self.started.set()
        if body.get("stream"):
            return StreamingResponse(self._chunks(flight), media_type="text/event-stream")
        listener = asyncio.get_running_loop().create_task(_disconnected(request))
        answer = asyncio.get_running_loop().create_task(self._whole(flight))
        await asyncio.wait([listener, answer], return_when=asyncio.FIRST_COMPLETED)
        listener.cancel()
        if not answer.done():
            answer.cancel()
            self.cancelled.set()
            return Response(status_code=499)
        return JSONResponse({"id": "chatcmpl-R", "created": self.created, "text": answer.result()})

    async def _chunks(self, flight: Flight | None) -> AsyncIterator[bytes]:
        try:
            yield event("", self.created)
            async for part in self._outputs(flight):
                if flight is not None and isinstance(part, int):
                    flight.note_yielded(1)
                yield part if isinstance(part, bytes) else event(f"<{part}>", self.created)
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def _whole(self, flight: Flight | None) -> str:
        return "".join([f"<{part}>" async for part in self._outputs(flight) if isinstance(part, int)])

    async def _outputs(self, flight: Flight | None) -> AsyncIterator[bytes | int]:
        if flight is not None and flight.replay is not None:
            async for batch in flight.replay.batches():
                flight.note_tokens(list(batch))
                for step in batch:
                    yield step.token
        while (part := await self.parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            if flight is not None and isinstance(part, int):
                flight.note_tokens([TokenStep(part)])
            yield part

    # the engine

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def open_flight(self, flight: Flight) -> AsyncIterator[None]:
        self.flights[flight.leg] = flight
        try:
            yield
        finally:
            del self.flights[flight.leg]
            self.closed.append(flight.leg)

    def flight(self, leg: Leg) -> Flight | None:
        return self.flights.get(leg)

    def load(self) -> LoadReport:
        sizes = {"free_tokens": 1000, "block_tokens": 4, "max_model_tokens": 1000}
        return a_report("", incarnation="", sequence=0, url="", models=("scripted",), running=len(self.flights), **sizes)

    def watch_load(self, changed: Callable[[bool], None]) -> None:
        self.load_changed = changed

    # migration: only what the llumlet's own tests reach

    def layout(self) -> KVLayout:
        return LAYOUT

    def check_movable(self, leg: Leg) -> None:
        if leg not in self.flights:
            raise RequestEnded

    async def look(self, leg: Leg) -> Progress:
        raise NotImplementedError

    def steps(self, leg: Leg) -> tuple[TokenStep, ...]:
        return tuple(self.flights[leg].history)

    async def wait_first_token(self, leg: Leg) -> None:
        raise NotImplementedError

    async def offer_channel(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        raise NotImplementedError

    async def send_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
        raise NotImplementedError

    async def freeze(self, leg: Leg) -> Frozen:
        raise NotImplementedError

    async def thaw(self, leg: Leg) -> None:
        raise NotImplementedError

    async def wait_ended(self, leg: Leg) -> None:
        if (flight := self.flights.get(leg)) is not None:
            await flight.ended.wait()

    async def accept_channel(self, peer: InstanceId, offer: ChannelOffer) -> None:
        raise NotImplementedError

    async def reserve(self, leg: Leg, steps: Sequence[TokenStep], room_tokens: int) -> int:
        return 0

    async def receive_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> None:
        raise NotImplementedError

    async def adopt(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        return None

    async def activate(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int) -> None:
        if leg not in self.flights:
            raise RequestEnded

    async def discard(self, leg: Leg) -> None:
        return None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
