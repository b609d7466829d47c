"""Serves a launcher's API for as long as it is wanted: inside `midstream up`, and as `midstream launcher`."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import uvicorn

from deploy.launch.service import LauncherService, Starter


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(starter: Starter, token: str | None, listener: socket.socket) -> AsyncIterator[None]:
    """The API answers while this lasts."""
    config = uvicorn.Config(
        LauncherService(starter, token).app(), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True


@asynccontextmanager
async def serving_here(starter: Starter) -> AsyncIterator[Mapping[str, str]]:
    """The same on a free port of this machine, with a token; yields what a gateway's environment says of it."""
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(starter, token, listener):
            yield {"MIDSTREAM_LAUNCHER_URL": f"http://127.0.0.1:{listener.getsockname()[1]}", "MIDSTREAM_LAUNCHER_TOKEN": token}
