"""Leases: which of several processes may act. At most one holder at a time, by the store's own clock.

A holder that was slow may act after it lost its lease; so each grant has a fencing token, larger than all before it, that goes with every
order, and whoever carries orders out refuses a token smaller than one it has seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lease:
    """A grant. `token` grows with every change of holder."""

    name: str
    holder: str
    token: int


class LeaseStore(Protocol):
    """Every failure is a StoreError."""

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """The lease, for `ttl_s` from now, if it is free or the holder's already (then with the same token); else None."""

    async def release(self, lease: Lease) -> bool:
        """Give it back; False if it was not held any more."""


@dataclass(frozen=True, slots=True)
class _Granted:
    lease: Lease
    expires_s: float


class MemoryLeases:
    """A LeaseStore in one process; `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._granted: dict[str, _Granted] = {}
        self._tokens: dict[str, int] = {}

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        now_s = self._clock()
        known = self._granted.get(name)
        if known is not None and known.expires_s > now_s:
            if known.lease.holder != holder:
                return None
            lease = known.lease
        else:
            self._tokens[name] = max(self._tokens.get(name, 0) + 1, int(now_s * 1000))
            lease = Lease(name, holder, self._tokens[name])
        self._granted[name] = _Granted(lease, now_s + ttl_s)
        return lease

    async def release(self, lease: Lease) -> bool:
        known = self._granted.get(lease.name)
        if known is None or known.lease != lease or known.expires_s <= self._clock():
            return False
        del self._granted[lease.name]
        return True
