"""What can be done with the connection that a request came on, beyond what ASGI offers."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

_EXTENSION = "midstream.connection"

ROOM_BYTES = 32 * 1024
"""What may wait for a client that reads slowly before it is waited for; less than a server lets wait."""

_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class ClientConnection:
    """Of a server that is not ours: nothing can be done."""

    has_room = False
    """A chunk of an answer under way may be written past the server, now, and need not be waited for."""

    def write_chunk(self, data: bytes) -> None:
        """Write one, if there is room. Not empty: that would end the answer."""
        raise NotImplementedError

    def abort(self) -> None:
        """Reset it."""

    def gather(self) -> None:
        """Keep what is written, until `flush`."""

    def flush(self) -> None:
        """Send what was kept, in one write."""


def extensions_of(connection: ClientConnection) -> dict[str, dict[object, object]]:
    """What a server adds to a request's scope so that the request can reach its connection."""
    return {_EXTENSION: {"connection": connection}}


def connection_of(scope: Scope) -> ClientConnection:
    """The connection of a scope's request."""
    connection = scope.get("extensions", {}).get(_EXTENSION, {}).get("connection")
    return connection if isinstance(connection, ClientConnection) else ClientConnection()


def _do_nothing() -> None:
    """Of a connection that is lost, nothing is left to be reset."""


class GatheringTransport(ClientConnection):
    """A server's transport that is such a connection. Everything else is the transport's own. `reset` closes it at once."""

    def __init__(self, transport: asyncio.Transport, reset: Callable[[], None]) -> None:
        self._transport = transport
        self._reset = reset
        self._gathered: list[bytes] = []
        self._is_chunked = False
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def has_room(self) -> bool:  # type: ignore[override]
        transport = self._transport
        return self._is_chunked and not transport.is_closing() and transport.get_write_buffer_size() < ROOM_BYTES

    def write_chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def gather(self) -> None:
        self._is_chunked = False
        self.write = self._gathered.append

    def flush(self) -> None:
        if self._gathered:
            data = b"".join(self._gathered)
            self._gathered.clear()
            self._is_chunked = _CHUNKED in data[: data.find(b"\r\n\r\n") + 2]
            self._transport.write(data)
        self.write = self._transport.write

    def lost(self) -> None:
        """It is over; nobody is to be kept alive by it."""
        self._gathered.clear()
        self._is_chunked = False
        self._reset = _do_nothing

    def close(self) -> None:
        """After what was gathered, as after anything that was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._reset()
