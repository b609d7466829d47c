"""What can be done with the connection that a request came on, beyond what ASGI offers."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

_EXTENSION = "midstream.connection"


class ClientConnection:
    """Of a server that is not ours: nothing can be done."""

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
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def gather(self) -> None:
        self.write = self._gathered.append

    def flush(self) -> None:
        if self._gathered:
            data = b"".join(self._gathered)
            self._gathered.clear()
            self._transport.write(data)
        self.write = self._transport.write

    def lost(self) -> None:
        """It is over; nobody is to be kept alive by it."""
        self._gathered.clear()
        self._reset = _do_nothing

    def close(self) -> None:
        """After what was gathered, as after anything that was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._reset()
