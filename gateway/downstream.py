"""The client's side of one request: the body it sends, the answer it gets, and the moment it leaves."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from gateway.client_connection import ClientConnection
from gateway.deadline import within
from gateway.errors import REASON_HEADER, BodyTimeout, BodyTooLarge, ClientLeft, ClientTooSlow, GatewayError, RawHeaders
from gateway.headers import answer_headers
from gateway.stream_ends import closing_events, whole_error

KEEP_ALIVE = b": keep-alive\n\n"


class Downstream:
    """Writes whole events only, so that a comment may come between any two writes. `ours` are headers added to whatever is answered.

    `path` is the route that was asked for: errors are told in the words of its API.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        clock: Callable[[], float],
        path: str,
        *,
        write_timeout_s: float | None = None,
        connection: ClientConnection | None = None,
    ) -> None:
        self._receive = receive
        self._asgi_send = send
        self._write_timeout_s = write_timeout_s
        self.connection = connection or ClientConnection()
        """For what is written past the server, while the stream is open; then `sent_at_s` is to be kept."""
        self._clock = clock
        self.path = path
        self._body: bytes | None = None
        self._sending = asyncio.Lock()  # nothing may follow the end: held by what could
        self.ours: list[tuple[bytes, bytes]] = []
        self.started = False
        self.finished = False
        self.sent_at_s = clock()
        """When the client was last sent anything; at first: when the request came."""

    async def read_body(self, declared_bytes: str | None, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body; asked again, the same. Raises BodyTooLarge, BodyTimeout, ClientLeft."""
        if self._body is not None:
            return self._body
        too_large = BodyTooLarge(f"The body is over the limit of {limit_bytes} bytes.")
        if declared_bytes is not None and declared_bytes.isdigit() and int(declared_bytes) > limit_bytes:
            raise too_large
        try:
            self._body = await within(timeout_s, self._read_body(limit_bytes, too_large))
            return self._body
        except TimeoutError:
            raise BodyTimeout(f"The body did not come within {timeout_s:g} s.") from None

    async def _read_body(self, limit_bytes: int, too_large: BodyTooLarge) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > limit_bytes:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    async def wait_left(self) -> None:
        """Return when the client has closed its connection (or its answer is finished). The body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head of a stream."""
        self.started = True
        await self._send_head(status, answer_headers(headers, self.ours))

    async def write(self, data: bytes) -> None:
        """Send whole events. Waits while the client does not read. One at a time; a comment may come in between, in whole."""
        await self._send_body(data, more=True)
        self.sent_at_s = self._clock()

    async def keep_alive(self) -> None:
        """Send a comment, if a stream is open."""
        async with self._sending:
            if self.started and not self.finished:
                await self._send_body(KEEP_ALIVE, more=True)
                self.sent_at_s = self._clock()

    async def finish(self, last: bytes = b"") -> None:
        """End the stream, after these last events."""
        async with self._sending:
            self.finished = True
            await self._send_body(last, more=False)

    async def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole answer."""
        self.started = True
        length = (b"content-length", str(len(body)).encode())
        await self._send_head(status, (*answer_headers(headers, self.ours), length))
        await self.finish(body)

    async def fail(self, error: GatewayError) -> None:
        """Show an error in the way that is still open: as an answer, or as the end of the stream that has begun."""
        if self.finished:
            return
        with contextlib.suppress(ClientTooSlow):
            await self._show(error)

    async def _show(self, error: GatewayError) -> None:
        if self.started:
            await self.finish(closing_events(self.path, error))
        else:
            self.ours += [(name, value) for name, value in error.headers() if name == REASON_HEADER]  # the others pass by themselves
            await self.answer(error.status, error.headers(), whole_error(self.path, error))

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.connection.flush()

    async def _send(self, message: Message) -> None:
        """Waits while the client does not read, up to the deadline; then its connection is reset, and it has left. Raises ClientTooSlow."""
        try:
            await within(self._write_timeout_s, _sending(self._asgi_send, message))
        except TimeoutError:
            self.connection.abort()
            raise ClientTooSlow from None

    async def _send_head(self, status: int, headers: RawHeaders) -> None:
        """It leaves with what comes next, which comes at once."""
        async with self._sending:
            self.connection.gather()
            await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})
            self.sent_at_s = self._clock()


async def _sending(send: Send, message: Message) -> None:
    await send(message)
