import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.chaos.proxy import Proxy

HOST = "127.0.0.1"


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def test_bytes_pass_both_ways_and_so_does_the_end() -> None:
    async with asyncio.timeout(10), echo() as port, Proxy(HOST, port) as proxy:
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert proxy.open == 1
        writer.close()
        while proxy.open:
            await asyncio.sleep(0.002)


async def test_a_partition_holds_everything_back_until_it_heals() -> None:
    async with asyncio.timeout(10), echo() as port, Proxy(HOST, port) as proxy:
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.partition()
        writer.write(b"b")
        late_reader, late_writer = await asyncio.open_connection(HOST, proxy.port)
        late_writer.write(b"c")
        for waiting in (reader, late_reader):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting.read(1), 0.05)
        proxy.heal()
        assert (await reader.readexactly(1), await late_reader.readexactly(1)) == (b"b", b"c")
        writer.close()
        late_writer.close()


async def test_a_cut_is_a_reset_and_new_connections_pass() -> None:
    async with asyncio.timeout(10), echo() as port, Proxy(HOST, port) as proxy:
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()


async def test_delays() -> None:
    async with asyncio.timeout(10), echo() as port, Proxy(HOST, port) as proxy:
        proxy.delay_s = 0.05
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        started_s = asyncio.get_running_loop().time()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert asyncio.get_running_loop().time() - started_s >= 0.095
        writer.close()


async def test_nobody_behind_it() -> None:
    async with asyncio.timeout(10), echo() as port:
        dead = port
    async with asyncio.timeout(10), Proxy(HOST, dead) as proxy:
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
