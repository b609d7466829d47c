"""Connections to instances, kept for the next request. As many as are needed; idle ones only for a few seconds."""

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from gateway.http_connection import Connection

IDLE_CONNECTION_S = 3.0
"""Idle connections are dropped before the servers we talk to drop them (uvicorn: 5 s)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, as the base URL of an instance says it. `authority` is the value of the host header."""

    host: str
    port: int
    is_tls: bool
    authority: bytes


@lru_cache(maxsize=4096)
def split_url(url: str) -> tuple[Origin, str]:
    """The origin of a URL, and what follows it. Raises ValueError if it is not one of http or https."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator:
        raise ValueError(f"'{url}' is no http address")
    at = min((found for mark in "/?" if (found := rest.find(mark)) >= 0), default=len(rest))
    parts = urlsplit(f"//{rest[:at]}")
    if not parts.hostname:
        raise ValueError(f"'{url}' names no host")
    authority = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
    is_tls = scheme == "https"
    return Origin(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, authority), rest[at:] or ""


class Pool:
    """Owned by the HTTP client. `tls` is for instances at https addresses; None: what the system trusts."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._idle: dict[Origin, deque[Connection]] = {}

    async def take(self, origin: Origin) -> tuple[Connection, bool]:
        """A connection, and whether it was used before. Raises OSError, TimeoutError: nobody answers there."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_closed:
                continue
            if loop.time() - connection.idle_since_s < IDLE_CONNECTION_S:
                return connection, True
            connection.abort()
        async with asyncio.timeout(self._connect_timeout_s):
            tls = self._trusted() if origin.is_tls else None
            _, connection = await loop.create_connection(
                lambda: Connection(lambda one: self._keep(origin, one)), origin.host, origin.port, ssl=tls
            )
        return connection, False

    async def close(self) -> None:
        """Drop what is idle. What is in use ends with its answer."""
        idle = [connection for kept in self._idle.values() for connection in kept]
        self._idle.clear()
        for connection in idle:
            connection.abort()
        for connection in idle:
            await connection.wait_lost()

    def _trusted(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _keep(self, origin: Origin, connection: Connection) -> None:
        now_s = asyncio.get_running_loop().time()
        connection.idle_since_s = now_s
        idle = self._idle.setdefault(origin, deque())
        idle.append(connection)
        while idle[0].is_closed or now_s - idle[0].idle_since_s >= IDLE_CONNECTION_S:  # the oldest; never the one just added
            idle.popleft().abort()
