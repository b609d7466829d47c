import asyncio

import pytest

from backend.llumlet.buffer import StreamBuffer
from backend.llumlet.outlet import Head
from tests.backend.llumlet.live import wait_until


async def test_a_reader_gets_everything_from_the_first_event_on() -> None:
    buffer = StreamBuffer(100)
    await buffer.start(Head(200, ((b"a", b"b"),)))
    await buffer.write(b"x")
    reader = buffer.attach()
    assert await reader.read() == b'event: midstream\ndata: {"kind":"head","status":200,"headers":[["a","b"]]}\n\nx'
    await buffer.write(b"y")
    await buffer.end()
    assert await reader.read() == b"y"
    assert await reader.read() is None
    assert buffer.complete_for(reader)


async def test_a_reader_waits_for_what_is_to_come() -> None:
    buffer = StreamBuffer(100)
    reader = buffer.attach()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(reader.read())
        await asyncio.sleep(0)
        assert not reading.done()
        await buffer.write(b"x")
        assert await reading == b"x"


async def test_unread_bytes_are_bounded() -> None:
    buffer = StreamBuffer(10)
    await buffer.write(b"x" * 10)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(buffer.write(b"y"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not writing.done()
        reader = buffer.attach()
        assert await reader.read() == b"x" * 10
        await writing
    assert await reader.read() == b"y"


async def test_a_second_reader_takes_over_from_the_beginning() -> None:
    buffer = StreamBuffer(100)
    await buffer.write(b"a")
    first = buffer.attach()
    assert await first.read() == b"a"
    await buffer.write(b"b")
    second = buffer.attach()
    assert await first.read() is None
    assert buffer.complete_for(first)
    assert await second.read() == b"ab"
    buffer.leave(first)  # no longer counts
    await buffer.write(b"c")
    assert await second.read() == b"c"


async def test_what_was_read_is_kept_up_to_the_limit() -> None:
    buffer = StreamBuffer(3)
    reader = buffer.attach()
    for part in (b"a", b"b", b"c", b"d", b"e"):
        await buffer.write(part)
        assert await reader.read() == part
    assert await buffer.attach().read() == b"cde"


@pytest.mark.parametrize("how", ["leave", "abandon"])
async def test_when_the_reader_leaves_writers_wait_no_more(how: str) -> None:
    buffer = StreamBuffer(1)
    reader = buffer.attach()
    await buffer.write(b"a")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(buffer.write(b"b"))
        tasks.create_task(buffer.wait_left())
        tasks.create_task(buffer.wait_read())
        await asyncio.sleep(0)
        if how == "leave":
            buffer.leave(reader)
        else:
            buffer.abandon()
    assert await reader.read() is None


async def test_a_broken_stream_has_no_end() -> None:
    buffer = StreamBuffer(10)
    reader = buffer.attach()
    await buffer.write(b"a")
    buffer.close()
    assert await reader.read() == b"a"
    assert await reader.read() is None
    assert not buffer.complete_for(reader)


async def test_read_to_the_end_means_by_someone() -> None:
    buffer = StreamBuffer(10)
    await buffer.write(b"a")
    await buffer.end()
    buffer.close()
    async with asyncio.TaskGroup() as tasks:
        read = tasks.create_task(buffer.wait_read())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not read.done()
        assert await buffer.attach().read() == b"a"
        await wait_until(read.done)


async def test_nothing_is_buffered_after_the_end() -> None:
    buffer = StreamBuffer(10)
    buffer.close()
    await buffer.write(b"late")
    reader = buffer.attach()
    assert await reader.read() is None
