"""Whether a process answers: HTTP for ours, PING for Redis. The one place of `deploy` that talks over sockets."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import sample

import httpx

PROBE_TIMEOUT_S = 2.0
LEAST_PORT = 10_000
"""Below it are those of well-known services."""

Probe = Callable[[], Awaitable[bool]]


def http_probe(url: str) -> Probe:
    """Asks GET `url`; healthy is 200."""

    async def probe() -> bool:
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return probe


def redis_probe(port: int) -> Probe:
    """Asks PING of a Redis on the loopback interface."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except OSError:
            return False

    return probe


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen there right now. Raises OSError if `host` is no address of this machine."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def free_ports(host: str, count: int) -> list[int]:
    """So many different ports that are free right now; as far as there are enough, none of those that the system gives to outgoing
    connections, for one of these may take it before whoever is to listen there has started."""
    quiet = range(LEAST_PORT, _first_outgoing_port())
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for port in (*sample(quiet, min(len(quiet), 20 * count)), *[0] * count):
            if len(sockets) < count:
                with suppress(OSError):
                    sockets.append(stack.enter_context(socket.create_server((host, port))))
        return [int(s.getsockname()[1]) for s in sockets]


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # no Linux: nobody knows
        return LEAST_PORT
