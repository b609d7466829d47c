"""The requests being served at this instance right now, by leg."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from backend.llumlet.exchange import Exchange
from migration.leg import Leg, RequestId


class DuplicateLeg(Exception):
    """That leg is being served here already."""


class Flights:
    """Knows every exchange from its start to its end; a leg at most once."""

    def __init__(self) -> None:
        self._exchanges: dict[Leg, Exchange] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def serving(self, exchange: Exchange) -> Iterator[None]:
        """Know it while it lasts. Raises DuplicateLeg."""
        leg = exchange.flight.leg
        if leg in self._exchanges:
            raise DuplicateLeg(f"{leg.request} is being served here already")
        self._exchanges[leg] = exchange
        self._empty.clear()
        try:
            yield
        finally:
            del self._exchanges[leg]
            if not self._exchanges:
                self._empty.set()

    def __iter__(self) -> Iterator[Exchange]:
        return iter(tuple(self._exchanges.values()))

    def __len__(self) -> int:
        return len(self._exchanges)

    def latest(self, request: RequestId) -> Exchange | None:
        """The request's exchange with the highest epoch that has not ended."""
        here = [exchange for leg, exchange in self._exchanges.items() if leg.request == request and not exchange.flight.ended.is_set()]
        return max(here, key=lambda exchange: exchange.flight.leg.epoch, default=None)

    async def wait_released(self, request: RequestId) -> None:
        """Return when the engine holds nothing of what is served of that request now."""
        for exchange in self:
            if exchange.flight.leg.request == request:
                await exchange.released.wait()

    async def wait_empty(self) -> None:
        """Return when nothing is being served."""
        await self._empty.wait()
