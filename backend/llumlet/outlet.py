"""Where a served request's bytes go: the gateway's connection, or (buffer.py) a buffer that a gateway attaches to."""

from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Send

from backend.llumlet.wire import EVENT_STREAM


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    @property
    def streams_events(self) -> bool:
        return any(name.lower() == b"content-type" and value.lower().startswith(EVENT_STREAM) for name, value in self.headers)


EVENT_STREAM_HEAD = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))


class Outlet(Protocol):
    """Takes one answer: `start`, `write` whole events, `end` once; or `answer` alone. Not ending it means that it broke."""

    async def start(self, head: Head | None) -> None:
        """An event stream begins; `head` is the engine's own, None if it is not known yet. Called again when it is."""

    async def write(self, data: bytes) -> None:
        """Whole events. Returns when there is room for more."""

    async def answer(self, head: Head, body: bytes) -> None:
        """A whole answer that is not an event stream, instead of `start`."""

    async def end(self) -> None:
        """The event stream is complete."""

    async def wait_left(self) -> None:
        """Return when nobody will ever read this answer: its client has left."""


class ClientOutlet:
    """The gateway's own connection. `receive` must be past the request's body."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._started = False

    async def start(self, head: Head | None) -> None:
        if self._started:
            return
        self._started = True
        head = head or EVENT_STREAM_HEAD
        headers = [(name, value) for name, value in head.headers if name.lower() != b"content-length"]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def answer(self, head: Head, body: bytes) -> None:
        await self._send({"type": "http.response.start", "status": head.status, "headers": list(head.headers)})
        await self._send({"type": "http.response.body", "body": body})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def wait_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
