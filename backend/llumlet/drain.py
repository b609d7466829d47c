"""Leaving the fleet in good order: told once, an instance takes no more requests, lets the running ones end or move, and stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backend.llumlet.reply import Reply

log = logging.getLogger(__name__)


class Drain:
    """Begun at most once."""

    def __init__(self, *, deadline_s: float, retry_after_s: int) -> None:
        self._deadline_s = deadline_s
        self._retry_after_s = retry_after_s
        self._begun = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """From now on new requests are refused. To be called in the event loop's thread."""
        self._begun.set()

    def refusal(self) -> Reply:
        """What a new request is answered."""
        return Reply.error(
            503,
            "This instance is draining; another one will take the request.",
            code="instance_draining",
            headers=(("retry-after", str(self._retry_after_s)),),
        )

    async def run(self, *, begun: Callable[[], None], wait_idle: Callable[[], Awaitable[None]]) -> None:
        """Return once drained: begun, and nothing running any more or the deadline over. `begun` is called at the beginning."""
        await self._begun.wait()
        log.info("draining, for %.0f s at most", self._deadline_s)
        begun()
        try:
            async with asyncio.timeout(self._deadline_s):
                await wait_idle()
        except TimeoutError:
            log.warning("requests are still running at the end of the drain deadline; they are cut")
        else:
            log.info("drained")
