"""A TCP proxy in front of one process, which can cut, stall and delay what passes through it."""

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65536
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose closing is a reset."""


class Proxy:
    """Listens on a port of its own and passes bytes on to `port`; an async context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._target = port
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s = 0.0
        self.open = 0
        """Connections that pass through right now."""

    @property
    def port(self) -> int:
        assert self._server is not None, "used outside its context"
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        while self.open:  # each ends once its ends are closed
            self.cut()
            await asyncio.sleep(0.005)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            _reset(writer)

    def partition(self) -> None:
        """From now on nothing passes, not even the end of a connection."""
        self._passing.clear()

    def heal(self) -> None:
        """Everything passes, at once."""
        self.delay_s = 0.0
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self._writers.add(writer)
        try:
            await self._passing.wait()
            there_reader, there = await asyncio.open_connection(self._host, self._target)
        except OSError:
            _reset(writer)  # as the process itself would refuse
        else:
            self._writers.add(there)
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._pass(reader, there))
                    ways.create_task(self._pass(there_reader, writer))
            finally:
                self._writers.discard(there)
        finally:
            self._writers.discard(writer)
            self.open -= 1

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way, to its end, which is passed on too."""
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._hold_back()
                writer.write(data)
                await writer.drain()
            await self._hold_back()
            writer.close()
        except OSError:
            await self._passing.wait()
            _reset(writer)

    async def _hold_back(self) -> None:
        await self._passing.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    writer.transport.abort()
