"""Leaving the fleet in good order: an instance that drains takes no more requests and moves those it has away.

    ready <--begin, take_back--> draining --leave--> leaving, then the process stops
    ready ---------------------------------leave--> leaving

Draining is an operator's or a gateway's order, and can be taken back; leaving is the process's own end (SIGTERM), and cannot.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum

from backend.llumlet.reply import Reply

log = logging.getLogger(__name__)


class DrainState(StrEnum):
    """How far an instance is on its way out."""

    READY = "ready"
    DRAINING = "draining"
    LEAVING = "leaving"


class Drain:
    """One instance's. `clock` is monotonic, in seconds. To be called in the event loop's thread."""

    def __init__(self, *, deadline_s: float, retry_after_s: int, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._begun = asyncio.Event()
        self._leaving = asyncio.Event()
        self._began_s = 0.0
        self._listeners: list[Callable[[], None]] = []

    @property
    def draining(self) -> bool:
        """Whether new requests are refused: on an order, or because the process is to end."""
        return self._begun.is_set()

    @property
    def leaving(self) -> bool:
        return self._leaving.is_set()

    @property
    def state(self) -> DrainState:
        return DrainState.LEAVING if self.leaving else DrainState.DRAINING if self.draining else DrainState.READY

    @property
    def elapsed_s(self) -> float:
        """Since the drain began; 0 while there is none."""
        return self._clock() - self._began_s if self.draining else 0.0

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever the state has changed."""
        self._listeners.append(changed)

    def begin(self) -> None:
        """From now on new requests are refused and those that run move away. Nothing if it is so already."""
        if not self.draining:
            log.info("draining")
            self._began_s = self._clock()
            self._begun.set()
            self._tell()

    def take_back(self) -> bool:
        """Take new requests again. False if the process is to end: then it goes on draining."""
        if self.leaving:
            return False
        if self.draining:
            log.info("not draining any more")
            self._begun.clear()
            self._tell()
        return True

    def leave(self) -> None:
        """Drain, and then stop. Not to be taken back."""
        self.begin()
        self._leaving.set()
        self._tell()

    async def wait_draining(self) -> None:
        """Return when it drains."""
        await self._begun.wait()

    def refusal(self) -> Reply:
        """What a new request is answered."""
        return Reply.error(
            503,
            "This instance is draining; another one will take the request.",
            code="instance_draining",
            headers=(("retry-after", str(self._retry_after_s)),),
        )

    async def run(self, *, wait_idle: Callable[[], Awaitable[None]], give_up: Callable[[], Awaitable[None]]) -> None:
        """Return once the process may stop: leaving, and nothing running any more, or else, at the deadline, what runs given up."""
        await self._leaving.wait()
        log.info("leaving, within %.0f s", self._deadline_s)
        try:
            async with asyncio.timeout(self._deadline_s):
                await wait_idle()
        except TimeoutError:
            log.warning("requests are still running at the end of the drain deadline; they are given up")
            await give_up()
        else:
            log.info("drained")

    def _tell(self) -> None:
        for changed in self._listeners:
            changed()
