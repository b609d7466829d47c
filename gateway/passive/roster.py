"""Which passive backends there are: those of the settings, and what operators have added or removed since, in the shared records."""

import json
from collections.abc import Sequence

from backend.registry.record import RecordStore
from gateway.passive.reading import Passive
from migration.leg import InstanceId

KIND = "passive"

KEPT_S = 10 * 365 * 86400.0
"""What an operator orders holds until the opposite is ordered."""


class PassiveRoster:
    """Owned by the app. A record decides over the settings: a backend of theirs can be removed, too. Raises StoreError throughout."""

    def __init__(self, configured: Sequence[Passive], records: RecordStore) -> None:
        self._configured = {passive.id: passive for passive in configured}
        self._records = records

    async def members(self) -> Sequence[Passive]:
        """All there are now, ordered by id."""
        known = dict(self._configured)
        for name, record in (await self._records.read_all(KIND)).items():
            instance, ordered = InstanceId(name), json.loads(record.text)
            known.pop(instance, None)
            if ordered["url"] is not None:
                known[instance] = Passive(instance, ordered["url"])
        return [known[instance] for instance in sorted(known)]

    async def add(self, passive: Passive) -> None:
        """Watch it from now on, wherever the store is shared."""
        await self._order(passive.id, passive.url)

    async def remove(self, instance: InstanceId) -> bool:
        """Watch it no more; False if it was not watched."""
        if all(passive.id != instance for passive in await self.members()):
            return False
        await self._order(instance, None)
        return True

    async def _order(self, instance: InstanceId, url: str | None) -> None:
        while True:
            present = await self._records.read(KIND, instance)
            version = present.version if present else 0
            if await self._records.write(KIND, instance, json.dumps({"url": url}), version=version, ttl_s=KEPT_S):
                return
