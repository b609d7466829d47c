"""One gateway's hold on a lease: whether it may act, asked anew each time."""

import asyncio

from backend.registry.lease import Lease, LeaseStore
from backend.registry.store import StoreError


class Tenure:
    """Of the lease `name`. What is done between two calls of `hold` must take less than `ttl_s`."""

    def __init__(self, leases: LeaseStore, name: str, holder: str, *, ttl_s: float, store_timeout_s: float) -> None:
        self._leases = leases
        self._name = name
        self._holder = holder
        self._ttl_s = ttl_s
        self._store_timeout_s = store_timeout_s
        self._lease: Lease | None = None

    async def hold(self) -> Lease | None:
        """The lease, renewed; None if another gateway holds it, or if the store does not answer."""
        try:
            async with asyncio.timeout(self._store_timeout_s):
                self._lease = await self._leases.acquire(self._name, self._holder, self._ttl_s)
        except (StoreError, TimeoutError):
            self._lease = None
        return self._lease

    async def give_back(self) -> None:
        """So that another one need not wait for its end."""
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                async with asyncio.timeout(self._store_timeout_s):
                    await self._leases.release(lease)
            except (StoreError, TimeoutError):
                return  # it ends by itself
