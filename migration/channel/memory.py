"""A channel within one process, for tests. Faults can be planted at every operation."""

import threading
from collections import deque
from collections.abc import Callable

from migration.channel.base import Header
from migration.errors import ChannelError, ChannelTimeout

Fault = Callable[[str, int], None]
"""Called with the operation's name and its ordinal before each operation of either end; raises, waits, or lets it pass."""


def _no_fault(operation: str, ordinal: int) -> None:
    """Everything passes."""


class MemoryChannel:
    """Both ends at once: give it to a sender and to a receiver. What was sent waits without bound."""

    def __init__(self, *, timeout_s: float = 5.0, fault: Fault = _no_fault) -> None:
        self._timeout_s = timeout_s
        self._fault = fault
        self._sent: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._operations = 0

    def send_header(self, header: Header) -> None:
        self._enter("send_header")
        self._put(header.to_bytes())

    def send_chunk(self, chunk: memoryview) -> None:
        self._enter("send_chunk")
        self._put(bytes(chunk))

    def drain(self) -> None:
        """What was sent was copied."""

    def receive_header(self) -> Header:
        self._enter("receive_header")
        return Header.from_bytes(self._take())

    def receive_chunk(self, into: memoryview) -> None:
        self._enter("receive_chunk")
        chunk = self._take()
        if len(chunk) != into.nbytes:
            self.close()
            raise ChannelError(f"a chunk of {len(chunk)} bytes, {into.nbytes} expected")
        into.cast("B")[:] = chunk

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enter(self, operation: str) -> None:
        with self._changed:
            self._operations += 1
            ordinal = self._operations
        self._fault(operation, ordinal)

    def _put(self, message: bytes) -> None:
        with self._changed:
            if self._closed:
                raise ChannelError("the channel is closed")
            self._sent.append(message)
            self._changed.notify_all()

    def _take(self) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._sent or self._closed, self._timeout_s):
                raise ChannelTimeout(f"nothing came in {self._timeout_s} s")
            if self._closed:
                raise ChannelError("the channel is closed")
            return self._sent.popleft()
