"""A relay's second task: sees the client leave, keeps an idle stream open, and cuts off an instance that fell silent or hangs."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.downstream import Downstream
from gateway.errors import ClientLeft
from gateway.ledger import Ledger
from gateway.liveness import is_hung, patience_s
from gateway.settings import GatewaySettings
from migration.leg import InstanceId

log = logging.getLogger("midstream.gateway.attendant")


class Attendant:
    """Owned by one relay, which says when it listens to which instance."""

    def __init__(self, client: Downstream, ledger: Ledger, settings: GatewaySettings, clock: Callable[[], float], tier: str) -> None:
        self._client = client
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._tier = tier
        self._instance = InstanceId("")
        self.heard_at_s = 0.0
        """When the relay began to wait, or was last told something meanwhile; said by the relay."""
        self._cut: Callable[[], None] | None = None
        self._waits = 0

    def listen(self, instance: InstanceId, cut: Callable[[], None]) -> None:
        """The relay waits for that instance, until `rest`. `cut` ends it: whoever waits hears of a failure."""
        self._instance, self._cut, self.heard_at_s = instance, cut, self._clock()
        self._waits += 1

    def rest(self) -> None:
        """The relay waits no more."""
        self._cut = None

    @contextmanager
    def listening(self, instance: InstanceId, cut: Callable[[], None]) -> Iterator[None]:
        """The relay waits for that instance meanwhile."""
        self.listen(instance, cut)
        try:
            yield
        finally:
            self.rest()

    async def run(self) -> None:
        """Until the answer is finished. Raises ClientLeft."""
        settings = self._settings
        ticks = (settings.keepalive_interval_s, settings.idle_timeout_s / 2, patience_s(self._tier, settings.hang_timeout_s, 0.0) / 2)
        tick_s = min(tick for tick in ticks if tick > 0)
        while True:
            try:
                async with asyncio.timeout(tick_s):
                    await self._client.wait_left()
                if not self._client.finished:
                    raise ClientLeft
                return
            except TimeoutError:
                pass
            wait, cut = (self._waits, self.heard_at_s), self._cut
            if cut is not None and await self._is_dead() and cut is self._cut and wait == (self._waits, self.heard_at_s):
                cut()
            if settings.keepalive_interval_s and self._clock() - self._client.sent_at_s >= settings.keepalive_interval_s:
                await self._client.keep_alive()

    async def _is_dead(self) -> bool:
        settings, instance = self._settings, self._instance
        silent_s = self._clock() - self.heard_at_s
        if silent_s > settings.idle_timeout_s:
            return True
        if silent_s < patience_s(self._tier, settings.hang_timeout_s, 0.0):
            return False
        cluster = await self._ledger.view(settings.report_stale_s / 10)
        if not self._ledger.is_store_up:
            return False
        hung = is_hung(instance, silent_s, self._tier, cluster, settings.hang_timeout_s, settings.report_stale_s)
        if hung:
            log.warning("%s counts as dead: no event for %.1f s, and its reports have stopped", instance, silent_s)
        return hung
