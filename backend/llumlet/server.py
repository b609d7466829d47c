"""uvicorn's server, which on the first signal drains before it stops, and on the second stops at once."""

import asyncio
from types import FrameType

import uvicorn

from backend.llumlet.drain import Drain


class DrainingServer(uvicorn.Server):
    """`stop` is to be called once drained."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM, between two bytecodes of the main thread."""
        if self._loop is None or self._drain.leaving:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._drain.leave)

    def stop(self) -> None:
        """Leave the main loop: stop listening, close connections, shut the app down."""
        self.should_exit = True
