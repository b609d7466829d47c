"""This gateway's turn at a job that one gateway does at a time: the lease it is held under, and for how long it may be believed."""

import asyncio
import logging
import secrets
from collections.abc import Callable

from backend.registry.lease import Lease, LeaseStore
from backend.registry.store import StoreError
from migration.leg import InstanceId

RENEWALS = 5
"""Tries to renew within a lease's life. Another gateway takes over at the next of its own, so within 1.2 lives of a death."""

log = logging.getLogger("midstream.gateway.term")


class Term:
    """One grant. `fenced` are the instances that know its token: they take no order of an earlier holder any more."""

    def __init__(self, lease: Lease, until_s: float) -> None:
        self.lease = lease
        self.until_s = until_s
        self.fenced: set[InstanceId] = set()

    @property
    def token(self) -> int:
        return self.lease.token


class Office:
    """A named job and this gateway's tries to hold it. `clock` is monotonic, in seconds."""

    def __init__(
        self, name: str, gateway_id: str, leases: LeaseStore, *, ttl_s: float, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._holder = f"{gateway_id}/{secrets.token_hex(4)}"  # two gateways of one name are still two
        self._leases = leases
        self._ttl_s = ttl_s
        self._timeout_s = min(timeout_s, ttl_s / 2)
        self._clock = clock
        self._term: Term | None = None

    @property
    def term(self) -> Term | None:
        """The present grant; None if this gateway may not act."""
        return self._term if self._term is not None and self.may_act(self._term) else None

    async def keep(self) -> None:
        """Take the lease whenever it is free, and prolong it, for ever; give it back on leaving."""
        try:
            while True:
                try:
                    await self.hold()
                except Exception:  # the root of a task; what cannot be asked for is not held
                    log.exception("asking for the lease of the %s failed", self._name)
                    self.resign()
                await asyncio.sleep(self._ttl_s / RENEWALS)
        finally:
            await self.leave()

    async def hold(self) -> None:
        """Take or prolong the lease. If another gateway has it, or the store does not answer, this one may not act."""
        asked_s = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                lease = await self._leases.acquire(self._name, self._holder, self._ttl_s)
        except (StoreError, TimeoutError):
            lease = None
        if lease is None:
            self.resign()
        elif self._term is None or self._term.lease.token != lease.token:
            log.info("this gateway does the %s now, token %d", self._name, lease.token)
            self._term = Term(lease, asked_s + self._ttl_s)
        else:
            self._term.until_s = asked_s + self._ttl_s

    def may_act(self, term: Term) -> bool:
        """Whether that grant still holds, whatever has happened since: counted from before it was asked for."""
        return self._term is term and self._clock() < term.until_s

    def resign(self) -> None:
        """Act no more under the present grant. It expires by itself."""
        if self._term is not None:
            log.info("this gateway does the %s no more", self._name)
        self._term = None

    async def leave(self) -> None:
        """Give the lease back, so that another gateway need not wait for its end."""
        term, self._term = self._term, None
        if term is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._leases.release(term.lease)
        except (StoreError, TimeoutError):
            return  # it expires
