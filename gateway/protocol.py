"""uvicorn's HTTP protocol with bounds on what a client may send and how slowly: the part of a request that no route ever sees.

Bounded are: the bytes of a head, the time a head may take, the time a body may take whoever reads it, and the time that a client which does
not read keeps a connection after its answer. A route reaches the connection through the scope (client_connection.py).
"""

import asyncio
import contextlib
import socket
import struct
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.client_connection import GatheringTransport, extensions_of
from gateway.errors import BodyTimeout, GatewayError, HeadTimeout, HeadTooLarge
from gateway.settings import GatewaySettings

ROUTE_S = 1.0
"""A route that reads a body has the same deadline, and gets so long to say so."""

_AT_ONCE = struct.pack("ii", 1, 0)


def bounded_protocol(settings: GatewaySettings) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn's configuration."""

    class Bounded(BoundedProtocol):
        max_head_bytes = settings.max_header_bytes
        head_timeout_s = settings.header_timeout_s
        body_timeout_s = settings.body_timeout_s
        write_timeout_s = settings.write_timeout_s

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Use the subclasses that `bounded_protocol` makes."""

    max_head_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw, self._connection = transport, GatheringTransport(transport, self._reset)
        super().connection_made(cast("asyncio.Transport", self._connection))
        self._watch(self.head_timeout_s, HeadTimeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)
        self._connection.lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and self._is_all_head(data):
                self._turn_away(HeadTooLarge(f"The head of the request is over {self.max_head_bytes} bytes."))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self.cycle is not None:  # else the clock runs since the connection was made
            self._watch(self.head_timeout_s, HeadTimeout)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._watch(self.body_timeout_s, BodyTimeout)
        self.scope["extensions"] = extensions_of(self._connection)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unwatch()
        self._in_head = True  # whatever comes next is
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_if_unread()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_if_unread()

    def _is_all_head(self, data: bytes) -> bool:
        """A packet that ends the head may be long because a body follows in it."""
        end = data.find(b"\r\n\r\n")
        return end < 0 or self._head_bytes - len(data) + end > self.max_head_bytes

    def _watch(self, seconds: float, error: type[GatewayError]) -> None:
        self._unwatch()
        self._timer = self.loop.call_later(seconds, self._late, seconds, error)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float, error: type[GatewayError]) -> None:
        if self.flow.read_paused:  # it is this side that does not read: behind another request, say
            self._watch(seconds, error)
        elif error is HeadTimeout:
            self._turn_away(HeadTimeout(f"The head of the request did not come within {seconds:g} s."))
        else:
            self._timer = self.loop.call_later(ROUTE_S, self._reset)

    def _turn_away(self, error: GatewayError) -> None:
        """Answer in OpenAI's shape, if no other answer is being sent, and close."""
        self._unwatch()
        cycle: RequestResponseCycle | None = self.cycle
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete):
            body = error.body()
            head = f"HTTP/1.1 {error.status} {type(error).__name__}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
        self._end_if_unread()

    def _end_if_unread(self) -> None:
        """A connection that is closing waits for its client to read what was written; not for ever."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.write_timeout_s, self._reset)

    def _reset(self) -> None:
        """Close at once, so that the system too forgets what was not read."""
        with contextlib.suppress(OSError, AttributeError):  # closed already
            self._raw.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._raw.abort()
