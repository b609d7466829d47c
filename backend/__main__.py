"""Runs one backend: an engine's OpenAI server with its llumlet, `python -m backend --engine vllm --model NAME [-- ENGINE'S OWN FLAGS]`."""

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from urllib.parse import urlsplit

import uvicorn
import uvloop

from backend.engine.base import Engine
from backend.llumlet.app import build
from backend.llumlet.server import DrainingServer
from backend.llumlet.settings import LlumletSettings
from backend.peers.environment import read_or_exit
from backend.registry.store import InstanceStore

KEEP_ALIVE_S = 30
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backend", description="An engine's OpenAI server that can give running requests away and take them in."
    )
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="what runs the model (default: %(default)s)")
    parser.add_argument("--model", help="name or path of the model; for the fake engine, the name it is served under")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--redis", help="URL of the shared store (default: MIDSTREAM_REDIS_URL; without one no gateway learns of this instance)"
    )
    parser.add_argument("--instance-id", help="name of this instance (default: MIDSTREAM_INSTANCE_ID, or random)")
    parser.add_argument("--advertised-url", help="base URL for gateways and other backends (default: http://HOST:PORT)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; the exit status. Everything after `--` goes to the engine as it is."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:cut])
    if options.engine == "fake" and arguments[cut + 1 :]:
        parser.error("the fake engine takes no flags after --; it is set up by MIDSTREAM_FAKE_ variables")
    with closing(_bind(options.host, options.port)) as listener:
        settings = _settings(options, listener.getsockname()[1])
        if not settings.advertised_url:
            parser.error(f"listening on {options.host!r}, --advertised-url (or MIDSTREAM_ADVERTISED_URL) is needed")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        signal.signal(signal.SIGTERM, _exit_at_once)  # until the server is up and drains instead
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options, arguments[cut + 1 :], settings, listener))


def _exit_at_once(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port, so that it can be advertised; connections are refused until the server listens."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _settings(options: argparse.Namespace, port: int) -> LlumletSettings:
    given = {"redis_url": options.redis, "instance_id": options.instance_id, "advertised_url": options.advertised_url}
    settings = read_or_exit(LlumletSettings, **{name: value for name, value in given.items() if value is not None})
    if settings.advertised_url or options.host in _WILDCARDS:
        return settings
    host = f"[{options.host}]" if ":" in options.host else options.host
    return settings.model_copy(update={"advertised_url": f"{settings.tls.scheme}://{host}:{port}"})


async def _serve(options: argparse.Namespace, engine_flags: Sequence[str], settings: LlumletSettings, listener: socket.socket) -> int:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(_open_store(settings.redis_url))
        engine = await stack.enter_async_context(_open_engine(options, engine_flags, settings))
        app = build(engine, settings, store, stop=lambda: server.stop())
        config = uvicorn.Config(
            app,
            log_level="info",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            **settings.tls.for_server(),
            timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout_s)),
        )
        server = DrainingServer(config, app.drain)
        await server.serve(sockets=[listener])
        return 1 if app.failed else 0


@asynccontextmanager
async def _open_store(redis_url: str | None) -> AsyncIterator[InstanceStore]:
    store: InstanceStore
    if redis_url:
        from backend.registry.redis import RedisStore

        store = RedisStore(redis_url)
    else:
        from backend.registry.memory import MemoryStore

        store = MemoryStore(time.monotonic)
    try:
        yield store
    finally:
        await store.close()


def _open_engine(options: argparse.Namespace, flags: Sequence[str], settings: LlumletSettings) -> AbstractAsyncContextManager[Engine]:
    host = urlsplit(settings.advertised_url).hostname or options.host
    return _open_fake(options.model, host) if options.engine == "fake" else _open_vllm(options, flags, host)


@asynccontextmanager
async def _open_fake(model: str | None, host: str) -> AsyncIterator[Engine]:
    from backend.engine.fake.engine import build_fake_engine
    from backend.engine.fake.settings import FakeSettings

    settings = read_or_exit(FakeSettings)
    yield build_fake_engine(settings.model_copy(update={"model": model}) if model else settings, host)


@asynccontextmanager
async def _open_vllm(options: argparse.Namespace, flags: Sequence[str], host: str) -> AsyncIterator[Engine]:
    from backend.engine.vllm.server import open_engine, parse
    from backend.engine.vllm.settings import KVSettings

    model = ["--model", options.model] if options.model else []
    args = parse([*model, "--host", options.host, "--port", str(options.port), *flags])
    async with open_engine(args, read_or_exit(KVSettings), host) as engine:
        yield engine


if __name__ == "__main__":
    sys.exit(main())
