import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop

from backend.engine.fake.channel import SocketChannels
from migration.channel.base import ABORTED, OVERTAKEN
from migration.errors import ChannelError, ChannelTimeout, ChannelUnknown
from migration.leg import InstanceId
from migration.messages import ChannelOffer

A, B = InstanceId("a"), InstanceId("b")
BLOCK_BYTES = 32


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


class Sink(dict[int, bytes]):
    def place(self, index: int, data: bytes) -> None:
        self[index] = data


@asynccontextmanager
async def pair(*, timeout_s: float = 5, bytes_per_s: float = 0) -> AsyncIterator[tuple[SocketChannels, SocketChannels]]:
    """The channels of A, which sends, and of B."""
    ends = [SocketChannels("127.0.0.1", advertised="", bytes_per_s=bytes_per_s, timeout_s=timeout_s) for _ in range(2)]
    async with ends[0].open(), ends[1].open():
        yield ends[0], ends[1]


async def joined(a: SocketChannels, b: SocketChannels) -> ChannelOffer:
    offer = a.offer(B, fresh=False)
    await b.accept(A, offer)
    return offer


async def receive(b: SocketChannels, transfer: int, first: int, end: int, sink: Sink) -> None:
    await b.receive(A, transfer, first, end, BLOCK_BYTES, sink.place)


async def failure_of(awaitable: Awaitable[object]) -> ChannelError | None:
    try:
        await awaitable
    except ChannelError as error:
        return error
    return None


async def test_blocks_arrive_in_order_transfer_after_transfer() -> None:
    async with pair() as (a, b):
        offer = await joined(a, b)
        sink = Sink()
        assert await a.send(B, 1, 0, [block(1), block(2)]) == 64
        await receive(b, 1, 0, 2, sink)
        await a.send(B, 2, 2, [block(3)])
        await receive(b, 2, 2, 3, sink)
        assert sink == {index: bytes(block(index + 1)) for index in range(3)}
        assert a.offer(B, fresh=False) == offer
        await b.accept(A, offer)


async def test_a_fresh_channel_replaces_the_old_one() -> None:
    async with pair() as (a, b):
        old = await joined(a, b)
        fresh = a.offer(B, fresh=True)
        assert fresh.incarnation != old.incarnation
        await b.accept(A, fresh)
        await a.send(B, 1, 0, [block(1)])
        sink = Sink()
        await receive(b, 1, 0, 1, sink)
        assert sink[0] == bytes(block(1))


async def test_an_incarnation_that_is_not_known_any_more_is_refused() -> None:
    async with pair() as (a, b):
        stale = replace(a.offer(B, fresh=False), incarnation="0" * 32)
        with pytest.raises(ChannelUnknown):
            await b.accept(A, stale)
        with pytest.raises(ChannelError, match="kind"):
            await b.accept(A, replace(stale, kind="gloo"))
        with pytest.raises(ChannelError, match="cannot join"):
            await b.accept(A, replace(stale, addresses=("127.0.0.1:1",)))


async def test_without_an_offer_nothing_is_sent() -> None:
    async with pair() as (a, b):
        with pytest.raises(ChannelUnknown):
            await a.send(B, 1, 0, [block(1)])
        with pytest.raises(ChannelUnknown):
            await receive(b, 1, 0, 1, Sink())


async def test_nobody_joins() -> None:
    async with pair(timeout_s=0.05) as (a, _):
        a.offer(B, fresh=False)
        with pytest.raises(ChannelTimeout):
            await a.send(B, 1, 0, [block(1)])


async def test_nothing_comes() -> None:
    async with pair(timeout_s=0.05) as (a, b):
        await joined(a, b)
        with pytest.raises(ChannelTimeout):
            await receive(b, 1, 0, 1, Sink())
        with pytest.raises(ChannelUnknown):
            await receive(b, 2, 0, 1, Sink())


async def test_an_aborted_transfer_leaves_the_channel_usable() -> None:
    async with pair() as (a, b):
        await joined(a, b)
        await a.send_nothing(B, 1)
        with pytest.raises(ChannelError, match="nothing for transfer 1") as called_off:
            await receive(b, 1, 0, 1, Sink())
        assert called_off.value.reason == ABORTED
        await a.send(B, 2, 0, [block(1)])
        sink = Sink()
        await receive(b, 2, 0, 1, sink)
        assert sink[0] == bytes(block(1))


async def test_frames_nobody_waits_for_any_more_are_skipped() -> None:
    async with pair() as (a, b):
        await joined(a, b)
        await a.send(B, 1, 0, [block(1), block(2)])
        await a.send_nothing(B, 2)
        await a.send(B, 3, 0, [block(3)])
        sink = Sink()
        await receive(b, 3, 0, 1, sink)
        assert sink == {0: bytes(block(3))}


async def test_a_transfer_that_was_overtaken_leaves_the_channel_usable() -> None:
    async with pair() as (a, b):
        offer = await joined(a, b)
        await a.send(B, 3, 0, [block(3)])
        for late in (1, 2):
            error = await failure_of(receive(b, late, 0, 1, Sink()))
            assert error is not None
            assert error.reason == OVERTAKEN
        sink = Sink()
        await receive(b, 3, 0, 1, sink)
        assert sink == {0: bytes(block(3))}
        assert a.offer(B, fresh=False) == offer


async def test_an_early_transfer_that_nobody_waits_for_is_skipped() -> None:
    async with pair() as (a, b):
        await joined(a, b)
        await a.send(B, 2, 0, [block(2)])
        assert await failure_of(receive(b, 1, 0, 1, Sink())) is not None
        await a.send(B, 3, 0, [block(3)])
        sink = Sink()
        await receive(b, 3, 0, 1, sink)
        assert sink == {0: bytes(block(3))}


@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 2)])
async def test_other_blocks_than_expected_break_the_channel(first: int, end: int) -> None:
    async with pair() as (a, b):
        await joined(a, b)
        await a.send(B, 3, 0, [block(1)])
        assert await failure_of(receive(b, 3, first, end, Sink())) is not None
        with pytest.raises(ChannelUnknown):
            await receive(b, 4, 0, 1, Sink())


async def test_damage_on_the_way_is_noticed() -> None:
    async with pair() as (a, b):
        offer = a.offer(B, fresh=False)
        port = int(offer.addresses[0].rpartition(":")[2])

        async def meddle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            up_writer.write(await reader.readexactly(32))
            writer.write(await up_reader.readexactly(1))
            frame = bytearray(await up_reader.readexactly(28 + BLOCK_BYTES + 4))
            frame[30] ^= 1
            writer.write(frame)
            await writer.drain()
            for end in (up_writer, writer):
                end.close()
                await end.wait_closed()

        async with await asyncio.start_server(meddle, "127.0.0.1", 0) as meddler:
            there = f"127.0.0.1:{meddler.sockets[0].getsockname()[1]}"
            await b.accept(A, replace(offer, addresses=(there,)))
            await a.send(B, 1, 0, [block(1)])
            with pytest.raises(ChannelError, match="damaged"):
                await receive(b, 1, 0, 1, Sink())


async def test_a_send_broken_off_in_mid_frame_fails_the_receive_at_once() -> None:
    async with pair(bytes_per_s=BLOCK_BYTES * 20) as (a, b), asyncio.TaskGroup() as group:
        await joined(a, b)
        sink = Sink()
        sending = group.create_task(a.send(B, 1, 0, [block(1), block(2), block(3)]))
        receiving = group.create_task(failure_of(receive(b, 1, 0, 3, sink)))
        while not sink:
            await asyncio.sleep(0)
        sending.cancel()
        error = await receiving
        assert error is not None
        assert "broke" in str(error)
        assert len(sink) < 3
        assert a.offer(B, fresh=False).incarnation


async def test_a_destination_that_comes_back_gets_a_new_channel() -> None:
    async with pair() as (a, b):
        old = await joined(a, b)
        b._drop_receiving(A)
        async with asyncio.timeout(5):
            while a.offer(B, fresh=False) == old:
                await asyncio.sleep(0)
        await joined(a, b)
        await a.send(B, 1, 0, [block(1)])
        await receive(b, 1, 0, 1, Sink())


async def test_a_capped_transfer_takes_its_time() -> None:
    async with pair(bytes_per_s=BLOCK_BYTES * 100) as (a, b), asyncio.TaskGroup() as group:
        await joined(a, b)
        start_s = asyncio.get_running_loop().time()
        group.create_task(receive(b, 1, 0, 5, Sink()))
        await a.send(B, 1, 0, [block(1)] * 5)
        assert asyncio.get_running_loop().time() - start_s >= 0.045


def test_a_receiver_that_dies_in_mid_transfer_is_a_channel_error() -> None:
    """On the event loop that backends run on: there, writing to a closed connection raises no OSError."""

    async def send_to_the_dying() -> ChannelError | None:
        async with pair(bytes_per_s=10 * BLOCK_BYTES) as (a, b), asyncio.TaskGroup() as group:
            await joined(a, b)
            sending = group.create_task(failure_of(a.send(B, 1, 0, [block(number) for number in range(30)])))
            receiving = b._receiving[A]
            await receiving.reader.readexactly(1)
            reset = struct.pack("ii", 1, 0)  # closed as the kernel closes it for a process that was killed
            receiving.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            receiving.writer.transport.abort()
            return await sending

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert isinstance(runner.run(send_to_the_dying()), ChannelError)
