"""What a hostile client gets, over real sockets: bounds on heads, on slow senders and on slow readers."""

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.scripted import Exchange, event, shown, told

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}'
WHOLE = REQUEST + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)


async def tells(exchange: Exchange) -> None:
    await exchange.stream(*told())


@asynccontextmanager
async def raw(rig: Rig, receive_buffer: int | None = None) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that a test writes on byte by byte."""
    parts = urlsplit(rig.url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of the answer, after which the connection is closed."""
    head, body = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"}}")
    with suppress(ConnectionError):  # reset, if more was sent than was read
        assert await reader.read(1) == b""
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "head",
    [
        REQUEST + b"x: " + b"y" * 5000 + b"\r\n\r\n",
        REQUEST + b"".join(b"x-%d: y\r\n" % number for number in range(800)) + b"\r\n",
        b"POST /" + b"y" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        REQUEST + b"x: " + b"y" * 5000,
    ],
    ids=["one header", "many headers", "target", "unfinished"],
)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_head_over_the_limit_is_turned_away(head: bytes, in_pieces: bool) -> None:
    async with make_rig(max_header_bytes=4096) as rig, raw(rig) as (reader, writer):
        step = 500 if in_pieces else len(head)
        try:
            for at in range(0, len(head), step):
                writer.write(head[at : at + step])
                await writer.drain()
        except ConnectionError:
            pass  # it has been turned away already
        assert await refusal(reader) == (431, "head_too_large")


async def test_a_body_in_the_packet_of_its_head_is_no_head() -> None:
    long = BODY.replace(b"hello", b"h" * 20_000)
    async with make_rig(max_header_bytes=4096) as rig, raw(rig) as (reader, writer):
        (await rig.add("a")).script = tells
        for _ in range(3):  # on one connection
            writer.write(REQUEST + b"content-length: %d\r\n\r\n%s" % (len(long), long))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            while await reader.readline() != b"0\r\n":
                pass
            await reader.readline()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", REQUEST])
async def test_a_head_that_does_not_come_is_waited_for_so_long(sent: bytes) -> None:
    async with make_rig(header_timeout_s=0.1) as rig, raw(rig) as (reader, writer):
        writer.write(sent)
        assert await refusal(reader) == (408, "head_timeout")


async def test_a_head_that_comes_in_drops_has_no_more_time() -> None:
    async with make_rig(header_timeout_s=0.2) as rig, raw(rig) as (reader, writer):

        async def drip() -> None:
            for byte in REQUEST * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.005)

        dripping = asyncio.create_task(drip())
        assert await refusal(reader) == (408, "head_timeout")
        dripping.cancel()


async def test_a_second_request_has_its_own_time() -> None:
    async with make_rig(header_timeout_s=0.1) as rig, raw(rig) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            while not (await reader.readline()).startswith(b"{") and not reader.at_eof():
                if b"degraded" in reader._buffer:  # type: ignore[attr-defined]
                    await reader.readuntil(b"}")
                    break
            await asyncio.sleep(0.15)
        writer.write(b"GET /hea")
        assert await refusal(reader) == (408, "head_timeout")


async def test_a_body_that_does_not_come() -> None:
    async with make_rig(body_timeout_s=0.1) as rig, raw(rig) as (reader, writer):
        writer.write(REQUEST + b"content-length: 1000\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head
        assert json.loads(await reader.readuntil(b"}}"))["error"]["code"] == "body_timeout"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)


async def test_a_client_that_does_not_read_is_cut_off_and_its_engine_is_free() -> None:
    part = b"data: " + b"x" * 50_000 + b"\n\n"

    async def floods(exchange: Exchange) -> None:
        await exchange.head()
        for number in range(1000):
            await exchange.send(event(number + 1, 0, (7,), part))

    async with make_rig(write_timeout_s=0.2) as rig, raw(rig, receive_buffer=4096) as (reader, writer):
        (backend := await rig.add("a")).script = floods
        writer.write(WHOLE)
        await reader.readline()
        await until(lambda: len(backend.seen) == 1 and backend.open == 0)
        await rig.quiet()
        assert await rig.metric('midstream_gateway_requests_total{outcome="client_too_slow",tier="normal"} 1.0')
        with pytest.raises(ConnectionResetError):
            while await reader.read(65536):
                pass


async def test_a_client_that_reads_slowly_but_reads_gets_everything() -> None:
    part = b"data: " + b"x" * 10_000 + b"\n\n"
    parts = [event(number + 1, 0, (7,), part) for number in range(60)] + [event(60, 1, (), b"data: [DONE]\n\n")]

    async def floods(exchange: Exchange) -> None:
        await exchange.stream(*parts)

    async with make_rig(write_timeout_s=1.0) as rig, raw(rig, receive_buffer=4096) as (reader, writer):
        (await rig.add("a")).script = floods
        writer.write(WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
        got = b""
        while data := await reader.read(16_384):
            got += data
            await asyncio.sleep(0.005)
        assert len(got) > len(shown(parts))
        assert got.rstrip().endswith((b"[DONE]", b"0"))


async def test_an_answer_that_is_never_read_does_not_hold_its_connection_for_ever() -> None:
    async def tells_all(exchange: Exchange) -> None:
        await exchange.answer(200, b'"' + b"x" * 4_000_000 + b'"')

    async with make_rig(write_timeout_s=0.2) as rig, raw(rig, receive_buffer=4096) as (reader, writer):
        (await rig.add("a")).script = tells_all
        writer.write(WHOLE.replace(b"host: x", b"host: x\r\nconnection: close"))
        await reader.readline()
        connection = writer.get_extra_info("socket")
        await until(lambda: connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET)
