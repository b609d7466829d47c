"""What happens to migrations, streams and instances, told to whoever listens at GET /admin/events."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

SEEN_BY_ALL = frozenset({"instance"})
"""What each gateway sees for itself, and need not tell another."""


@dataclass(frozen=True, slots=True)
class GatewayEvent:
    """One event. `number` rises by one with each event of this gateway; 0 for what is told to one listener alone, or by another gateway."""

    number: int
    kind: str
    fields: Mapping[str, object]


class Subscription:
    """One listener's events, a bounded number of them: one that reads too slowly loses the oldest, and is told how many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[GatewayEvent] = deque()
        self._skipped = 0
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, event: GatewayEvent) -> None:
        """Never waits."""
        if len(self._waiting) == self._limit:
            self._waiting.popleft()
            self._skipped += 1
        self._waiting.append(event)
        self._changed.set()

    async def next(self) -> GatewayEvent | None:
        """The next event; None once closed."""
        while not (self._waiting or self._closed):
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            return None
        if self._skipped:
            skipped, self._skipped = self._skipped, 0
            return GatewayEvent(0, "skipped", {"events": skipped})
        return self._waiting.popleft()

    def close(self) -> None:
        """End it, whatever still waits."""
        self._closed = True
        self._changed.set()


class EventFeed:
    """Owned by the app. `limit` is how many events wait for one listener, at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._told = 0
        self._listeners: set[Subscription] = set()
        self.outgoing = Subscription(limit)
        """What other gateways are to be told."""

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def open(self) -> Subscription:
        """A subscription that hears nothing until it listens."""
        return Subscription(self._limit)

    @contextmanager
    def listening(self, subscription: Subscription) -> Iterator[None]:
        """It hears everything meanwhile."""
        self._listeners.add(subscription)
        try:
            yield
        finally:
            self._listeners.discard(subscription)

    def publish(self, kind: str, fields: Mapping[str, object]) -> None:
        """Tell all who listen. Never waits."""
        self._told += 1
        event = GatewayEvent(self._told, kind, fields)
        if kind not in SEEN_BY_ALL:
            self.outgoing.put(event)
        for listener in self._listeners:
            listener.put(event)

    def pass_on(self, kind: str, fields: Mapping[str, object]) -> None:
        """Tell all who listen of what another gateway has told. Never waits."""
        for listener in self._listeners:
            listener.put(GatewayEvent(0, kind, fields))
