"""Rates: how much of something may be used a second, shared by all who use it. Token buckets, refilled by the store's own clock.

A bucket begins full. More than a bucket can ever hold may be taken from a full one; then it owes, and is empty until it has made up for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Rate:
    """What flows in each second, and how much a bucket holds."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Charge:
    """So much of one bucket."""

    bucket: str
    amount: float
    rate: Rate


class RateStore(Protocol):
    """Buckets by name. Every failure is a StoreError."""

    async def take(self, charges: Sequence[Charge]) -> float:
        """Take all or nothing. 0 if taken, else the seconds after which all can be had, if nobody else takes of them."""

    async def correct(self, charges: Sequence[Charge]) -> None:
        """What was used was more (or, below zero, less) than what was taken. Buckets may owe afterwards, and never overflow."""


@dataclass(frozen=True, slots=True)
class _Level:
    level: float
    at_s: float
    full_s: float
    """When it will be full, and so can be forgotten."""


class MemoryRates:
    """A RateStore in one process; `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[str, _Level] = {}

    async def take(self, charges: Sequence[Charge]) -> float:
        return self.take_now(charges)

    def take_now(self, charges: Sequence[Charge]) -> float:
        """See `take`."""
        now_s = self._clock()
        self._forget_full(now_s)
        wait_s = max((self._wait_s(charge, now_s) for charge in charges), default=0.0)
        if wait_s > 0:
            return wait_s
        self._use(charges, now_s)
        return 0.0

    async def correct(self, charges: Sequence[Charge]) -> None:
        self._use(charges, self._clock())

    def _wait_s(self, charge: Charge, now_s: float) -> float:
        missing = min(charge.amount, charge.rate.burst) - self._level(charge, now_s)
        return missing / charge.rate.per_s if missing > SLACK else 0.0

    def _level(self, charge: Charge, now_s: float) -> float:
        kept = self._levels.get(charge.bucket)
        if kept is None:
            return charge.rate.burst
        return min(charge.rate.burst, kept.level + (now_s - kept.at_s) * charge.rate.per_s)

    def _use(self, charges: Sequence[Charge], now_s: float) -> None:
        for charge in charges:
            level = min(charge.rate.burst, self._level(charge, now_s) - charge.amount)
            self._levels[charge.bucket] = _Level(level, now_s, now_s + (charge.rate.burst - level) / charge.rate.per_s)

    def _forget_full(self, now_s: float) -> None:
        for bucket in [bucket for bucket, kept in self._levels.items() if kept.full_s <= now_s]:
            del self._levels[bucket]


SLACK = 1e-6
"""Less than this is missing by rounding only."""
