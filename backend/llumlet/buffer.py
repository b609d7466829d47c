"""The stream of a request that arrived here, kept until a gateway reads it. Bounded: a full buffer holds the request back."""

import asyncio
from collections import deque

from backend.llumlet.outlet import Head
from backend.llumlet.wire import answer_event, head_event

_READ_BYTES = 256 * 1024


class StreamBuffer:
    """An Outlet whose events wait for their reader. One attachment at a time; each starts at the first event still kept.

    At most `limit_bytes` wait unread, after that `write` does; as many bytes already read are kept for a second attachment.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._read: deque[bytes] = deque()
        self._read_bytes = 0
        self._reader: Attachment | None = None
        self._ended = False
        self._closed = False
        self._left = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def attached(self) -> bool:
        return self._reader is not None

    async def start(self, head: Head | None) -> None:
        if head is not None:
            await self.write(head_event(head.status, head.headers))

    async def answer(self, head: Head, body: bytes) -> None:
        await self.write(head_event(head.status, head.headers) + answer_event(head.status, head.headers, body))
        await self.end()

    async def write(self, data: bytes) -> None:
        while self._unread_bytes >= self._limit_bytes and not self._left:
            await self._wait_change()
        if self._left or self._closed:
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        self._wake()

    async def end(self) -> None:
        self._ended = True
        self._wake()

    async def wait_left(self) -> None:
        while not self._left:
            await self._wait_change()

    def abandon(self) -> None:
        """Nobody will read on."""
        self._left = True
        self._wake()

    def close(self) -> None:
        """Nothing more will be written, whether the stream is complete or broke."""
        self._closed = True
        self._wake()

    def attach(self) -> "Attachment":
        """A reader of everything; takes over from the one before."""
        self._unread.extendleft(reversed(self._read))
        self._unread_bytes += self._read_bytes
        self._read.clear()
        self._read_bytes = 0
        self._reader = Attachment(self)
        self._wake()
        return self._reader

    async def wait_attached(self) -> None:
        while self._reader is None:
            await self._wait_change()

    async def wait_read(self) -> None:
        """Return when a reader has taken the last byte of a closed stream, or left."""
        while not (self._left or (self._closed and self._reader is not None and not self._unread_bytes)):
            await self._wait_change()

    async def read(self, reader: "Attachment") -> bytes | None:
        """The next bytes for that reader, joined; None at the end of the stream or when another took over."""
        while reader is self._reader and not self._left:
            taken = self._take()
            if taken:
                return taken
            if self._ended or self._closed:
                return None
            await self._wait_change()
        return None

    def complete_for(self, reader: "Attachment") -> bool:
        """Whether that reader's connection ends in good order (else it must be cut)."""
        return self._ended or reader is not self._reader

    def leave(self, reader: "Attachment") -> None:
        """That reader's connection was closed by its client."""
        if reader is self._reader:
            self.abandon()

    def _take(self) -> bytes:
        parts = []
        size = 0
        while self._unread and size < _READ_BYTES:
            part = self._unread.popleft()
            parts.append(part)
            size += len(part)
        self._unread_bytes -= size
        self._read.extend(parts)
        self._read_bytes += size
        while self._read_bytes > self._limit_bytes:
            self._read_bytes -= len(self._read.popleft())
        if size:
            self._wake()
        return b"".join(parts)

    async def _wait_change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Attachment:
    """One reader of a StreamBuffer, by identity."""

    def __init__(self, buffer: StreamBuffer) -> None:
        self.buffer = buffer

    async def read(self) -> bytes | None:
        return await self.buffer.read(self)
