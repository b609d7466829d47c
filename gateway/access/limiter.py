"""Rates of API keys: in the store, shared by all gateways; while it does not answer, each gateway holds its callers to them by itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from backend.registry.rates import Charge, MemoryRates, RateStore
from backend.registry.store import StoreError

T = TypeVar("T")

log = logging.getLogger("midstream.gateway.limiter")


class Limiter:
    """Never fails, and keeps nobody waiting longer than `timeout_s`. A store that failed is left alone for `retry_s`."""

    def __init__(self, shared: RateStore, clock: Callable[[], float], *, timeout_s: float, retry_s: float) -> None:
        self._shared = shared
        self._local = MemoryRates(clock)
        self._clock = clock
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._retry_at_s = float("-inf")

    async def take(self, charges: Sequence[Charge]) -> float:
        """See RateStore."""
        if not charges:
            return 0.0
        return await self._either(lambda: self._shared.take(charges), lambda: self._local.take(charges))

    async def correct(self, charges: Sequence[Charge]) -> None:
        """See RateStore."""
        if charges:
            await self._either(lambda: self._shared.correct(charges), lambda: self._local.correct(charges))

    async def _either(self, shared: Callable[[], Awaitable[T]], local: Callable[[], Awaitable[T]]) -> T:
        if self._clock() >= self._retry_at_s:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await shared()
            except (StoreError, TimeoutError) as error:
                self._retry_at_s = self._clock() + self._retry_s
                log.warning("rates are held by this gateway alone for now: %r", error)
        return await local()
