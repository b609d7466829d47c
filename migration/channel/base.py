"""The port over which the workers of two engines exchange KV blocks, rank to rank, and the frames on it.

A channel has one sender and one receiver. A transfer is a header and, unless the header says that nothing comes, its chunks:

    | magic 4 | version 1 | aborted 1 | 2 unused | transfer 8 | total bytes 8 |   chunk   |   chunk   | ...

Both sides cut a transfer into the same chunks; their number and sizes are not on the wire. Transfers start in rising order of their
numbers, so a receiver that meets a later number than its own knows that its own will never come.

All calls block and belong in a worker's thread. They raise ChannelError, or ChannelTimeout after the channel's own deadline; a channel
that raised in the middle of a transfer is broken: close it.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from migration.errors import ChannelError

_MAGIC = b"MSKV"
_VERSION = 1
_LAYOUT = struct.Struct("!4sBBxxQQ")

HEADER_BYTES = _LAYOUT.size

ABORTED, OVERTAKEN = "aborted", "overtaken"
"""Reasons of a ChannelError after which the channel is sound: the transfer did not come, and nothing of it is on the wire."""

Buffer = TypeVar("Buffer", contravariant=True)
"""Whatever the channel carries: a memoryview, a tensor."""


@dataclass(frozen=True, slots=True)
class Header:
    """Opens a transfer. `aborted`: the sender has nothing to send, go on without."""

    transfer: int
    total_bytes: int
    aborted: bool = False

    def to_bytes(self) -> bytes:
        """HEADER_BYTES bytes."""
        return _LAYOUT.pack(_MAGIC, _VERSION, self.aborted, self.transfer, self.total_bytes)

    @staticmethod
    def from_bytes(raw: bytes) -> "Header":
        """Raises ChannelError if it is no header."""
        try:
            magic, version, aborted, transfer, total_bytes = _LAYOUT.unpack(raw)
        except struct.error as error:
            raise ChannelError(f"malformed header: {error}") from error
        if magic != _MAGIC or version != _VERSION or aborted > 1:
            raise ChannelError("malformed header: the two sides are out of step")
        return Header(transfer, total_bytes, bool(aborted))


class KVChannel(Protocol[Buffer]):
    """One rank's end of a channel."""

    def send_header(self, header: Header) -> None: ...

    def send_chunk(self, chunk: Buffer) -> None:
        """Returns when the chunk sent BEFORE this one may be written to again: a sender takes turns with two buffers."""

    def drain(self) -> None:
        """Returns when every chunk sent may be written to again."""

    def receive_header(self) -> Header: ...

    def receive_chunk(self, into: Buffer) -> None:
        """Fill `into`; the other side sent a chunk of exactly that size."""

    def close(self) -> None:
        """Idempotent. A call in progress on either side raises ChannelError."""


class Outbox(Generic[Buffer]):
    """The sending side of a channel."""

    def __init__(self, channel: KVChannel[Buffer]) -> None:
        self._channel = channel

    def send(self, transfer: int, total_bytes: int, chunks: Iterable[Buffer]) -> None:
        """Send one transfer; each of `chunks` may be gathered when it is asked for, into two buffers in turn."""
        self._channel.send_header(Header(transfer, total_bytes))
        for chunk in chunks:
            self._channel.send_chunk(chunk)
        self._channel.drain()

    def abort(self, transfer: int) -> None:
        """Tell the receiver that this transfer will not come. Only instead of `send`, never in the middle of it."""
        self._channel.send_header(Header(transfer, 0, aborted=True))


class Inbox(Generic[Buffer]):
    """The receiving side of a channel."""

    def __init__(self, channel: KVChannel[Buffer]) -> None:
        self._channel = channel
        self._early: Header | None = None
        """Of a transfer that began while an earlier one was still awaited."""

    def receive(self, transfer: int, total_bytes: int, buffers: Iterable[Buffer]) -> None:
        """Receive one transfer into `buffers`, cut as the sender cuts it; each may be scattered when the next is asked for."""
        header = self._early or self._channel.receive_header()
        self._early = None
        while header.aborted and header.transfer < transfer:
            header = self._channel.receive_header()
        if header.transfer > transfer:
            self._early = header
            raise ChannelError(f"transfer {transfer} will not come: {header.transfer} follows", reason=OVERTAKEN)
        if header.aborted:
            raise ChannelError(f"the sender has given transfer {transfer} up", reason=ABORTED)
        if (header.transfer, header.total_bytes) != (transfer, total_bytes):
            self._channel.close()  # the chunks that follow are not ours to cut
            raise ChannelError(f"expected transfer {transfer} of {total_bytes} bytes, met {header}")
        for buffer in buffers:
            self._channel.receive_chunk(buffer)
