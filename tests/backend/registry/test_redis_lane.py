"""One connection that many share, against a server that answers as the test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from backend.registry.redis_lane import Lane

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def lane_to(serve: Serve, timeout_s: float = 5.0) -> AsyncIterator[Lane]:
    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(whole, "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        lane = Lane(writer, timeout_s)
        try:
            yield lane
        finally:
            await lane.close()


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each line with its own number."""
    while line := await reader.readline():
        writer.write(b":" + line.rstrip() + b"\r\n")


async def test_answers_come_in_order() -> None:
    async with lane_to(answer_all) as lane:
        assert await asyncio.gather(*(lane.ask(b"%d\n" % number) for number in range(100))) == list(range(100))


async def test_what_is_asked_at_once_goes_out_at_once() -> None:
    reads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reads.append(await reader.read(1000))
        writer.write(b":1\r\n:2\r\n")
        await reader.read(1)

    async with lane_to(serve) as lane:
        assert await asyncio.gather(*(lane.ask(each) for each in (b"a\n", b"b\n"))) == [1, 2]
    assert reads == [b"a\nb\n"]


async def test_who_stops_waiting_disturbs_nobody() -> None:
    async with lane_to(answer_all) as lane:
        first, second = lane.ask(b"1\n"), lane.ask(b"2\n")
        first.cancel()
        assert await second == 2
        assert await lane.ask(b"3\n") == 3


async def test_all_who_wait_hear_of_a_lost_connection() -> None:
    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readline()

    async with lane_to(serve) as lane:
        answers = await asyncio.gather(lane.ask(b"1\n"), lane.ask(b"2\n"), return_exceptions=True)
        assert all(isinstance(answer, ConnectionError) for answer in answers)
        with pytest.raises(ConnectionError):
            await lane.ask(b"3\n")


async def test_silence_has_an_end() -> None:
    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with lane_to(serve, timeout_s=0.05) as lane:
        with pytest.raises(TimeoutError):
            await lane.ask(b"1\n")
        assert isinstance(lane.fault, TimeoutError)


async def test_an_answer_that_nobody_asked_for_ends_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b":1\r\n:2\r\n")
        await reader.read(-1)

    async with lane_to(serve) as lane:
        assert await lane.ask(b"1\n") == 1
        with pytest.raises(ConnectionError):
            await lane.ask(b"2\n")


async def test_a_connection_reset_while_it_is_being_written_to_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop then raises RuntimeError, which once ended a backend."""

    def reset(_: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async with lane_to(answer_all) as lane:
        monkeypatch.setattr(lane._transport, "write", reset)
        with pytest.raises(ConnectionResetError):
            await lane.ask(b"1\n")
