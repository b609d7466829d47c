"""Notices instances that appear, change their state or disappear, while somebody listens for it."""

import asyncio
import logging
from collections.abc import Mapping

from gateway.events import EventFeed
from gateway.ledger import Ledger
from migration.leg import InstanceId

WATCH_INTERVAL_S = 0.5

log = logging.getLogger("midstream.gateway.watch")


class InstanceWatch:
    """Owned by the app. The store is asked only while the feed is heard, and seldom then: most looks find a view that is fresh enough."""

    def __init__(self, ledger: Ledger, feed: EventFeed) -> None:
        self._ledger = ledger
        self._feed = feed
        self._known: dict[InstanceId, str] = {}
        self._looking = asyncio.Lock()

    async def keep(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._feed.heard:
                try:
                    await self.look()
                except Exception:  # the root of a task; one bad round must not end the watch
                    log.exception("looking for changes among the instances failed")

    async def look(self) -> Mapping[InstanceId, str]:
        """The instances and their states now. Publishes how that differs from the last look."""
        async with self._looking:
            cluster = await self._ledger.view(WATCH_INTERVAL_S / 2)
            before, self._known = self._known, {view.id: view.state.value for view in cluster.instances}
            for instance in sorted(before.keys() | self._known.keys()):
                was, now = before.get(instance), self._known.get(instance)
                if was != now:
                    change = "appeared" if was is None else "disappeared" if now is None else "changed"
                    self._feed.publish("instance", {"id": instance, "change": change, "state": now, "was": was})
            return dict(self._known)
