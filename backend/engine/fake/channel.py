"""KV bytes between two fake engines: one TCP connection for each ordered pair, opened by the destination, written by the source.

    greeting    destination -> source    32 hex digits: the incarnation that the source has offered
    welcome     source -> destination    1 = yes, 0 = no such incarnation
    frame       source -> destination    magic, transfer, first block, end block, bytes | the blocks' bytes | CRC-32 of them
                                         a frame of the ABORT magic has no blocks: nothing comes for that transfer

Frames come in the order of their transfers, so a receiver that meets a later one knows that its own will never come; the later one's
header is kept for its own receiver. Whoever breaks off in the middle of a frame closes the connection: a channel is sound or gone.
"""

import asyncio
import socket
import struct
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from migration.channel.base import ABORTED, OVERTAKEN
from migration.errors import ChannelError, ChannelTimeout, ChannelUnknown
from migration.leg import InstanceId
from migration.messages import ChannelOffer

KIND = "socket"
_HEADER = struct.Struct("<4sQIIQ")
_CHECKSUM = struct.Struct("<I")
_BLOCKS, _ABORT = b"MSKV", b"MSKX"
_GREETING_BYTES = 32
_WELCOME, _UNKNOWN = b"\1", b"\0"
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(eq=False, slots=True)
class _Sending:
    """The source's end of a pair, from its offer on."""

    incarnation: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    @property
    def usable(self) -> bool:
        """Open, or not yet joined."""
        return self.writer is None or not (self.writer.is_closing() or self.reader is None or self.reader.at_eof())


@dataclass(frozen=True, slots=True)
class _Header:
    """Opens a frame."""

    magic: bytes
    transfer: int
    first_block: int
    end_block: int
    total_bytes: int

    @property
    def aborted(self) -> bool:
        """Nothing comes for that transfer."""
        return self.magic == _ABORT

    @property
    def remaining_bytes(self) -> int:
        """What follows it on the wire."""
        return 0 if self.aborted else self.total_bytes + _CHECKSUM.size


@dataclass(eq=False, slots=True)
class _Receiving:
    """The destination's end of a pair."""

    incarnation: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    early: _Header | None = None
    """Of a transfer that began while an earlier one was still awaited."""

    @property
    def usable(self) -> bool:
        return not self.writer.is_closing() and not self.reader.at_eof()


class SocketChannels:
    """All channels of one engine. `bytes_per_s` caps each transfer (0 = no cap); `timeout_s` is the longest silence borne."""

    def __init__(self, host: str, *, advertised: str, bytes_per_s: float, timeout_s: float) -> None:
        self._host = host
        self._advertised = advertised or (socket.gethostname() if host in _WILDCARDS else host)
        self._bytes_per_s = bytes_per_s
        self._timeout_s = timeout_s
        self._address = ""
        self._sending: dict[InstanceId, _Sending] = {}
        self._receiving: dict[InstanceId, _Receiving] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen, until left; then every channel closes."""
        async with asyncio.TaskGroup() as greetings:

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                greetings.create_task(self._greet(reader, writer))

            server = await asyncio.start_server(accepted, self._host, 0)
            self._address = f"{self._advertised}:{server.sockets[0].getsockname()[1]}"
            try:
                yield
            finally:
                server.close()
                for peer in tuple(self._sending):
                    self._drop_sending(peer)
                for peer in tuple(self._receiving):
                    self._drop_receiving(peer)

    # -- the source's end

    def offer(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        """The open or opening channel to that peer; a new one if there is none, if it is broken, or if `fresh`."""
        sending = self._sending.get(peer)
        if sending is None or fresh or not sending.usable:
            self._drop_sending(peer)
            sending = self._sending[peer] = _Sending(uuid.uuid4().hex)
        return ChannelOffer(KIND, sending.incarnation, (self._address,))

    async def send(self, peer: InstanceId, transfer: int, first_block: int, parts: Sequence[memoryview]) -> int:
        """One frame of blocks, from `first_block` on. Returns the bytes of the blocks. Raises ChannelError."""
        total = sum(len(part) for part in parts)
        header = _HEADER.pack(_BLOCKS, transfer, first_block, first_block + len(parts), total)
        async with self._frame(peer) as writer:
            _write(writer, header)
            checksum, sent = 0, 0
            start_s = asyncio.get_running_loop().time()
            for part in parts:
                _write(writer, part)
                checksum, sent = zlib.crc32(part, checksum), sent + len(part)
                async with asyncio.timeout(self._timeout_s):
                    await writer.drain()
                if self._bytes_per_s:
                    await asyncio.sleep(start_s + sent / self._bytes_per_s - asyncio.get_running_loop().time())
            _write(writer, _CHECKSUM.pack(checksum))
            async with asyncio.timeout(self._timeout_s):
                await writer.drain()
        return total

    async def send_nothing(self, peer: InstanceId, transfer: int) -> None:
        """Tell the receiver of that transfer that nothing comes. Raises ChannelError."""
        async with self._frame(peer) as writer, asyncio.timeout(self._timeout_s):
            _write(writer, _HEADER.pack(_ABORT, transfer, 0, 0, 0))
            await writer.drain()

    # -- the destination's end

    async def accept(self, peer: InstanceId, offer: ChannelOffer) -> None:
        """Join the offered channel; instant if this incarnation is open. Raises ChannelError, ChannelUnknown."""
        receiving = self._receiving.get(peer)
        if receiving is not None and receiving.usable and receiving.incarnation == offer.incarnation:
            return
        self._drop_receiving(peer)
        if offer.kind != KIND or len(offer.addresses) != 1:
            raise ChannelError(f"cannot join a channel of kind {offer.kind}")
        host, _, port = offer.addresses[0].rpartition(":")
        writer = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(offer.incarnation.encode())
                await writer.drain()
                if await reader.readexactly(1) != _WELCOME:
                    raise ChannelUnknown(f"{peer} does not know this channel any more")
                self._receiving[peer] = _Receiving(offer.incarnation, reader, writer)
        except (OSError, ValueError, EOFError) as error:  # TimeoutError is an OSError
            raise ChannelError(f"cannot join the channel of {peer}: {error}") from error
        finally:
            if writer is not None and (peer not in self._receiving or self._receiving[peer].writer is not writer):
                writer.close()

    async def receive(
        self, peer: InstanceId, transfer: int, first_block: int, end_block: int, block_bytes: int, place: Callable[[int, bytes], None]
    ) -> None:
        """Receive that transfer and `place(block index, bytes)` each block. Raises ChannelError, ChannelTimeout, ChannelUnknown.

        After the reasons `aborted` and `overtaken` the channel is sound; after any other it is closed.
        """
        receiving = self._receiving.get(peer)
        if receiving is None or not receiving.usable:
            self._drop_receiving(peer)
            raise ChannelUnknown(f"no channel from {peer}")
        async with receiving.lock:
            sound = False
            try:
                header = await self._header(receiving, transfer)
                if header is None or header.aborted:
                    sound = True
                    reason = ABORTED if header else OVERTAKEN
                    raise ChannelError(f"{peer} sends nothing for transfer {transfer}: it is {reason}", reason=reason)
                came = (header.first_block, header.end_block, header.total_bytes)
                if came != (first_block, end_block, (end_block - first_block) * block_bytes):
                    raise ChannelError(f"blocks {came[0]} to {came[1]} came for {first_block} to {end_block}")
                checksum = 0
                for block in range(first_block, end_block):
                    data = await self._read(receiving.reader, block_bytes)
                    checksum = zlib.crc32(data, checksum)
                    place(block, data)
                (expected,) = _CHECKSUM.unpack(await self._read(receiving.reader, _CHECKSUM.size))
                if checksum != expected:
                    raise ChannelError(f"transfer {transfer} came damaged")
                sound = True
            finally:
                if not sound:
                    self._close_receiving(peer, receiving)

    # -- inside

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        joined = False
        try:
            async with asyncio.timeout(self._timeout_s):
                incarnation = (await reader.readexactly(_GREETING_BYTES)).decode(errors="replace")
                sending = next((s for s in self._sending.values() if s.incarnation == incarnation and s.writer is None), None)
                writer.write(_WELCOME if sending else _UNKNOWN)
                await writer.drain()
                if sending is not None:
                    sending.reader, sending.writer = reader, writer
                    sending.joined.set()
                    joined = True
        except (OSError, EOFError):
            return
        finally:
            if not joined:
                writer.close()

    @asynccontextmanager
    async def _frame(self, peer: InstanceId) -> AsyncIterator[asyncio.StreamWriter]:
        """The connection to that peer, for one whole frame; closed if the frame is not completed."""
        sending = self._sending.get(peer)
        if sending is None:
            raise ChannelUnknown(f"no channel to {peer}")
        whole = False
        try:
            async with sending.lock:
                async with asyncio.timeout(self._timeout_s):
                    await sending.joined.wait()
                if sending.writer is None or not sending.usable:
                    raise ChannelError(f"the channel to {peer} is closed")
                yield sending.writer
                whole = True
        except TimeoutError as error:
            raise ChannelTimeout(f"{peer} does not read") from error
        except OSError as error:
            raise ChannelError(f"the channel to {peer} broke: {error}") from error
        finally:
            if not whole and self._sending.get(peer) is sending:
                self._drop_sending(peer)

    async def _header(self, receiving: _Receiving, transfer: int) -> _Header | None:
        """The header of that transfer's frame; None if a later one has begun. Frames whose receivers have given up are skipped."""
        header, receiving.early = receiving.early, None
        while header is None or header.transfer < transfer:
            remaining = header.remaining_bytes if header else 0
            while remaining:
                remaining -= len(await self._read(receiving.reader, min(remaining, 1 << 16)))
            header = _Header(*_HEADER.unpack(await self._read(receiving.reader, _HEADER.size)))
            if header.magic not in (_BLOCKS, _ABORT):
                raise ChannelError("malformed header: the two sides are out of step")
        if header.transfer > transfer:
            receiving.early = header
            return None
        return header

    async def _read(self, reader: asyncio.StreamReader, size: int) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reader.readexactly(size)
        except TimeoutError as error:
            raise ChannelTimeout("nothing came") from error
        except (OSError, EOFError) as error:
            raise ChannelError(f"the channel broke: {error}") from error

    def _drop_sending(self, peer: InstanceId) -> None:
        sending = self._sending.pop(peer, None)
        if sending is not None:
            sending.joined.set()
            if sending.writer is not None:
                sending.writer.close()

    def _drop_receiving(self, peer: InstanceId) -> None:
        receiving = self._receiving.pop(peer, None)
        if receiving is not None:
            receiving.writer.close()

    def _close_receiving(self, peer: InstanceId, receiving: _Receiving) -> None:
        receiving.writer.close()
        if self._receiving.get(peer) is receiving:
            del self._receiving[peer]


def _write(writer: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    """Raises ConnectionResetError once the peer has closed: some event loops raise a bare RuntimeError then, others nothing at all."""
    if writer.is_closing():
        raise ConnectionResetError("closed by the peer")
    writer.write(data)
