"""One HTTP/1.1 connection to an instance, on a bare asyncio protocol: a request, its answer's bytes as they come, and then the next.

The bytes of an answer wait here, at most about HIGH_WATER_BYTES of them; then the instance is held back until they are read. Faults are
OSError, whatever the library that parses calls them.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

Take = Callable[[bytes], bool]
"""Shown bytes as they come; says whether that settles them."""

HIGH_WATER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 256 * 1024


class Answer:
    """An answer under way: its head, and those of its bytes that nobody has read yet."""

    __slots__ = ("_connection", "_take", "_waiter", "buffered", "complete", "fault", "has_head", "headers", "parts", "status")

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.parts: list[bytes] = []
        self.buffered = 0
        self.complete = False
        self.fault: OSError | None = None

    async def wait_head(self) -> None:
        """Return when status and headers are there. Raises OSError."""
        while not self.has_head:
            await self._wait()

    async def read(self, take: Take | None = None) -> bytes:
        """All bytes that are there, or the next to come; empty at a clean end. Raises OSError, and what `take` raises.

        While nothing is there, `take` is shown what comes, before anybody wakes: what it settles is not read.
        """
        while not self.parts:
            if self.complete:
                return b""
            self._take = take
            try:
                await self._wait()
            finally:
                self._take = None
        data = self._joined()
        if self._connection.is_held_back:
            self._connection.let_go()
        return data

    def _joined(self) -> bytes:
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self.buffered = 0
        return data

    def close(self) -> None:
        """Idempotent. Unless the answer is complete, its connection ends, and whoever waits is told."""
        if not self.complete:
            self.fail(ConnectionAbortedError("closed"))
            self._connection.abort()

    def fail(self, fault: OSError) -> None:
        """Nothing more comes."""
        if not self.complete and self.fault is None:
            self.fault = fault
        self.wake()

    def come(self) -> None:
        """Bytes have come, and more will."""
        if self._take is not None and self.parts:
            data = self._joined()
            try:
                if self._take(data):
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised to whoever reads
                self._take = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
            self.parts.append(data)
            self.buffered = len(data)
        self.wake()

    def wake(self) -> None:
        """Something has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self.fault is not None:
            raise type(self.fault)(*self.fault.args)  # one of its own: the traceback knows this answer
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """Made by the loop. `on_idle` is told when an answer is complete and the connection may be used again."""

    def __init__(self, on_idle: "Callable[[Connection], None]") -> None:
        self._on_idle = on_idle
        self._answer: Answer | None = None
        self._head_bytes = 0
        self._is_bounded = False
        self._is_kept = False
        self.is_closed = False
        self.is_held_back = False
        self.idle_since_s = 0.0
        self._lost = asyncio.Event()

    def ask(self, head: bytes, body: bytes | None) -> Answer:
        """Send a request. The connection is idle or new."""
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._is_bounded = self._is_kept = False
        answer = self._answer = Answer(self)
        if self.is_closed:
            answer.fail(ConnectionResetError("closed while idle"))
        else:
            self._transport.writelines([head, body] if body else [head])
        return answer

    def abort(self) -> None:
        """End it at once."""
        self.is_closed = True
        self._transport.abort()

    async def wait_lost(self) -> None:
        """Return when it is closed on our side for good; soon after `abort`."""
        await self._lost.wait()

    def let_go(self) -> None:
        """Read on."""
        self.is_held_back = False
        if not self.is_closed:
            self._transport.resume_reading()

    # ------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # bytes that belong to no answer: whatever they are, this connection is of no more use
            self.abort()
            return
        if not answer.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break(ConnectionError("the instance changed the protocol"))
        except httptools.HttpParserError as error:
            self._break(ConnectionError(f"not HTTP: {error}"))
        else:
            if not answer.has_head and self._head_bytes > MAX_HEAD_BYTES:
                self._break(ConnectionError("the head of the answer is too long"))
            elif answer.complete:
                self._finish(answer)
            else:
                answer.come()
                if answer.buffered > HIGH_WATER_BYTES and not self.is_held_back:
                    self.is_held_back = True
                    self._transport.pause_reading()
                return
        answer.wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        vars(self).pop("_parser", None)  # each knows the other
        self._lost.set()
        answer, self._answer = self._answer, None
        if answer is None or answer.complete:
            return
        if error is None and answer.has_head and not self._is_bounded:
            answer.complete = True  # the end of the connection is this answer's only end
            answer.wake()
        else:
            answer.fail(error if isinstance(error, OSError) else ConnectionResetError("the connection ended before the answer did"))

    def _finish(self, answer: Answer) -> None:
        """The answer is complete. Used again only by agreement, and if nothing was held back or sent in excess."""
        self._answer = None
        if self.is_held_back:
            self.let_go()
        if self._is_kept and not self.is_closed:
            self._on_idle(self)
        else:
            self.is_closed = True
            self._transport.close()

    def _break(self, fault: OSError) -> None:
        if self._answer is not None:
            self._answer.fail(fault)
            self._answer = None
        self.abort()

    # ------------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.has_head:  # what follows the body is of no use to us
            name = name.lower()
            self._is_bounded = self._is_bounded or name in (b"content-length", b"transfer-encoding")
            answer.headers.append((name, value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is not None and not answer.has_head:
            status = self._parser.get_status_code()
            if status >= 200:
                answer.status = status
                answer.has_head = True

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.parts.append(body)
            self._answer.buffered += len(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.has_head:
            answer.complete = True
            self._is_kept = self._parser.should_keep_alive()  # the parser knows it here, and only here
        else:  # 100 Continue and the like: the answer is still to come
            answer.headers.clear()
            self._is_bounded = False
