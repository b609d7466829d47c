"""The HTTP client against servers that close connections at the wrong moment."""

import asyncio

import pytest

from gateway.errors import UpstreamBroken, UpstreamFailed, UpstreamSilent, UpstreamUnreachable
from gateway.upstream import Upstream
from tests.gateway.conftest import until
from tests.gateway.scripted import Exchange, scripted_backend


async def test_pooled_connection_that_was_closed_meanwhile_is_replaced_unseen() -> None:
    connections = ended = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request a connection, promises to keep it open, and closes it at the next request."""
        nonlocal connections, ended
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        await reader.read(1)
        writer.transport.abort()
        ended += 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Upstream.open(connect_timeout_s=1) as upstream:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(3):
            assert await upstream.get_json(url, 5) == {}
        assert connections == 3
    await until(lambda: ended == 3)


async def test_a_request_that_had_arrived_before_its_connection_broke_is_broken_and_no_conflict() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The second request arrives, and its connection breaks; sent again, it is a double."""
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections == 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
        else:
            writer.write(b"HTTP/1.1 409 Conflict\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await reader.read()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Upstream.open(connect_timeout_s=1) as upstream:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await upstream.get_json(url, 5) == {}
        with pytest.raises(UpstreamBroken, match="connection"):
            await upstream.post(url, "/x", (), b"{}")
        assert connections == 2


async def test_faults_have_names() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.wait_left()

    async def text(exchange: Exchange) -> None:
        await exchange.answer(200, b"nope")

    async def refusing(exchange: Exchange) -> None:
        await exchange.answer(418, b"{}")

    async with scripted_backend("a") as backend, Upstream.open(connect_timeout_s=1) as upstream:
        with pytest.raises(UpstreamUnreachable):
            await upstream.get_json("http://127.0.0.1:9/", 5)
        backend.script = silent
        with pytest.raises(UpstreamSilent):
            await upstream.get_json(backend.url, 0.1)
        backend.script = text
        with pytest.raises(UpstreamBroken):
            await upstream.get_json(backend.url, 5)
        backend.script = refusing
        with pytest.raises(UpstreamFailed, match="418"):
            await upstream.post_json(backend.url, {}, 5)


async def test_closing_wakes_a_waiting_read() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.wait_left()

    async with scripted_backend("a") as backend, Upstream.open(connect_timeout_s=1) as upstream:
        backend.script = stalls
        async with await upstream.post(backend.url, "/x", (), b"") as response, asyncio.timeout(5):
            asyncio.get_running_loop().call_soon(response.close)
            with pytest.raises(UpstreamBroken):
                await response.read()
