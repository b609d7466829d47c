"""PURE. How fast a line moves, and what to tell those who find no place in it."""

from dataclasses import dataclass
from math import ceil, exp

MEMORY_S = 10.0
"""How far back the measured rate reaches, about."""
MIN_GAP_S = 0.2
"""Looks closer together than this are one."""
MIN_RETRY_S = 1
MAX_RETRY_S = 300


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate at which requests leave a line for an instance, from a counter of them that is seen now and then."""

    bound: int
    at_s: float
    per_s: float | None = None
    """Requests a second; None: not measured yet."""

    def seen(self, bound: int, now_s: float) -> "Pace":
        """With one more look at the counter. A counter that has gone back begins anew."""
        gap_s = now_s - self.at_s
        if bound < self.bound:
            return Pace(bound, now_s)
        if gap_s < MIN_GAP_S:
            return self
        fresh = (bound - self.bound) / gap_s
        if self.per_s is None:
            return Pace(bound, now_s, fresh)
        kept = exp(-gap_s / MEMORY_S)
        return Pace(bound, now_s, kept * self.per_s + (1 - kept) * fresh)


def retry_after_s(before: int, per_s: float | None) -> int:
    """When it is worth trying again, in whole seconds: as soon as the `before` requests that come first have gone at that rate."""
    if not per_s:
        return MIN_RETRY_S if per_s is None else MAX_RETRY_S
    return min(MAX_RETRY_S, max(MIN_RETRY_S, ceil((before + 1) / per_s)))
