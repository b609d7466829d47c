"""The gateway as a process: `python -m gateway`."""

import argparse
import logging
import socket
import sys
from collections.abc import Sequence

import uvicorn

from backend.peers.environment import read_or_exit
from gateway.access.keys import BadKeys
from gateway.app import build_app
from gateway.garbage import look_seldom
from gateway.protocol import bounded_protocol
from gateway.settings import GatewaySettings
from gateway.workers import NotShared, follow, supervise


def run(settings: GatewaySettings, listener: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM: then accept nothing new, let running requests end within their grace, and return.

    With several workers this process is their supervisor. A `listener` that is given is served in place of host and port.
    """
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if settings.workers > 1:
        try:
            return supervise(settings)
        except NotShared as error:
            sys.exit(f"error: {error}")
    try:
        app = build_app(settings)
    except BadKeys as error:
        sys.exit(f"error: {settings.api_keys_file}: {error}")
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded_protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        backlog=4096,
        timeout_keep_alive=75,
        **settings.tls.for_server(),
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )
    look_seldom()
    uvicorn.Server(config).run(sockets=[listener] if listener else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Read flags over the environment, and serve."""
    parser = argparse.ArgumentParser(prog="midstream gateway", description="OpenAI-compatible gateway in front of Midstream backends.")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port (default 8000)")
    parser.add_argument(
        "--redis", dest="redis_url", metavar="URL", help="shared store (default redis://127.0.0.1:6379/0; with --backend: memory://)"
    )
    parser.add_argument("--backend", dest="backends", action="append", metavar="URL", help="plain OpenAI server to use (repeatable)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that serve the port together (default 1; more need a Redis)")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--supervisor", type=int, help=argparse.SUPPRESS)
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    fd, supervisor = flags.pop("fd", None), flags.pop("supervisor", None)
    if supervisor is not None:
        follow(supervisor)
    run(read_or_exit(GatewaySettings, **flags), socket.socket(fileno=fd) if fd is not None else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
