"""Connections to instances: kept, counted out, held back, and dropped when they are no good."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway import http_pool
from gateway.http_connection import HIGH_WATER_BYTES, Connection
from gateway.http_pool import Origin, Pool, split_url
from tests.gateway.conftest import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

Serve = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


@dataclass(eq=False)
class Server:
    """Answers each request with `serve`; counts connections and those that are open."""

    serve: Serve
    origin: Origin = field(init=False)
    connections: int = 0
    open: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        requests = 0
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                requests += 1
                await self.serve(writer, requests)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Server, Pool]]:
    server = Server(serve)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.origin = Origin("127.0.0.1", listening.sockets[0].getsockname()[1], False, b"x")
    pool = Pool(connect_timeout_s=5.0)
    async with listening:
        try:
            yield server, pool
        finally:
            await pool.close()
        await until(lambda: server.open == 0)


async def answers(writer: asyncio.StreamWriter, requests: int) -> None:
    writer.write(OK)


async def ask(connection: Connection) -> bytes:
    answer = connection.ask(ASK, None)
    await answer.wait_head()
    whole = b""
    while data := await answer.read():
        whole += data
    return whole


async def test_a_connection_is_used_again_and_two_requests_at_once_have_two() -> None:
    async with serving(answers) as (server, pool):
        first, is_reused = await pool.take(server.origin)
        assert not is_reused
        assert await ask(first) == b"{}"
        again, is_reused = await pool.take(server.origin)
        assert (again, is_reused) == (first, True)
        second, is_reused = await pool.take(server.origin)
        assert not is_reused
        assert await ask(again) == await ask(second) == b"{}"
        assert server.connections == 2


async def test_an_idle_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answers) as (server, pool):
        first, _ = await pool.take(server.origin)
        await ask(first)
        monkeypatch.setattr(http_pool, "IDLE_CONNECTION_S", 0.0)
        second, is_reused = await pool.take(server.origin)
        assert (second is first, is_reused, first.is_closed) == (False, False, True)
        second.abort()


async def test_bytes_beyond_the_answer_spoil_the_connection_and_not_the_answer() -> None:
    async def too_much(writer: asyncio.StreamWriter, requests: int) -> None:
        writer.write(OK + b"surplus")

    async with serving(too_much) as (server, pool):
        first, _ = await pool.take(server.origin)
        answer = first.ask(ASK, None)
        await answer.wait_head()
        assert await answer.read() == b"{}"
        await until(lambda: first.is_closed)
        _, is_reused = await pool.take(server.origin)
        assert not is_reused
        _.abort()


async def test_an_answer_that_nobody_reads_holds_the_instance_back() -> None:
    total = 40 * 2**20
    sent = 0

    async def floods(writer: asyncio.StreamWriter, requests: int) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * 2**16)
            sent += 2**16
            await writer.drain()

    async with serving(floods) as (server, pool):
        connection, _ = await pool.take(server.origin)
        answer = connection.ask(ASK, None)
        await answer.wait_head()
        await until(lambda: connection.is_held_back)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < total
        assert answer.buffered < 4 * HIGH_WATER_BYTES
        size = 0
        while data := await answer.read():
            size += len(data)
        assert size == total


async def test_closing_wakes_who_waits_and_ends_the_connection() -> None:
    async def silent(writer: asyncio.StreamWriter, requests: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")

    async with serving(silent) as (server, pool):
        connection, _ = await pool.take(server.origin)
        answer = connection.ask(ASK, None)
        await answer.wait_head()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_fails(answer.read()))
            await asyncio.sleep(0)
            answer.close()
            answer.close()
        assert waiting.result() is ConnectionAbortedError


async def _fails(reading: Awaitable[bytes]) -> type[OSError]:
    try:
        await reading
    except OSError as error:
        return type(error)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("url", "origin", "rest"),
    [
        ("http://h:1", Origin("h", 1, False, b"h:1"), ""),
        ("http://h/a?b", Origin("h", 80, False, b"h"), "/a?b"),
        ("https://[::1]:8/x", Origin("::1", 8, True, b"[::1]:8"), "/x"),
        ("http://user:word@h", Origin("h", 80, False, b"h"), ""),
    ],
)
def test_urls(url: str, origin: Origin, rest: str) -> None:
    assert split_url(url) == (origin, rest)


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:many"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError):
        split_url(url)


async def test_what_is_settled_as_it_comes_is_not_read() -> None:
    """And nobody wakes for it; what is not settled is read, and so is what comes with the end."""
    go_on = asyncio.Event()

    async def tells(writer: asyncio.StreamWriter, requests: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for word in (b"a", b"b", b"C", b"d"):
            await go_on.wait()
            go_on.clear()
            writer.write(b"1\r\n" + word + b"\r\n")
        writer.write(b"1\r\nE\r\n0\r\n\r\n")

    async with serving(tells) as (server, pool):
        connection, _ = await pool.take(server.origin)
        answer = connection.ask(ASK, None)
        await answer.wait_head()
        seen: list[bytes] = []

        def take(data: bytes) -> bool:
            seen.append(data)
            go_on.set()
            return data.islower()

        go_on.set()
        assert await answer.read(take) == b"C"
        assert seen == [b"a", b"b", b"C"]
        rest = b""
        while data := await answer.read():
            rest += data
        assert rest == b"dE"


async def test_what_goes_wrong_where_it_is_taken_is_raised_to_whoever_reads() -> None:
    async def tells(writer: asyncio.StreamWriter, requests: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
        await writer.drain()
        await asked.wait()
        writer.write(b"ab")

    asked = asyncio.Event()
    async with serving(tells) as (server, pool):
        connection, _ = await pool.take(server.origin)
        answer = connection.ask(ASK, None)
        await answer.wait_head()

        def take(data: bytes) -> bool:
            raise RuntimeError(data.decode())

        asked.set()
        with pytest.raises(RuntimeError, match="ab"):
            await answer.read(take)
        answer.close()
