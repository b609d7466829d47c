"""Records: small JSON documents that outlive the process that wrote them, changed by compare-and-set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """A document and its version, which grows by one with each change."""

    version: int
    text: str


class RecordStore(Protocol):
    """Documents by kind and name. Every failure is a StoreError."""

    async def write(self, kind: str, name: str, text: str, *, version: int, ttl_s: float) -> bool:
        """Replace version `version` (0: there is none yet) by the next one. False if that is not the present version: read again."""

    async def read(self, kind: str, name: str) -> Record | None:
        """The present version."""

    async def read_all(self, kind: str) -> Mapping[str, Record]:
        """All of that kind, by name."""

    async def delete(self, kind: str, name: str) -> bool:
        """True if it was there."""


@dataclass(frozen=True, slots=True)
class _Kept:
    record: Record
    expires_s: float


class MemoryRecords:
    """A RecordStore in one process; `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, dict[str, _Kept]] = {}
        self._ends: list[tuple[float, str, str]] = []
        """A heap of expiry, kind and name, for each version that was written: what has run out is found without looking at the rest."""

    async def write(self, kind: str, name: str, text: str, *, version: int, ttl_s: float) -> bool:
        present = await self.read(kind, name)
        if (present.version if present else 0) != version:
            return False
        expires_s = self._clock() + ttl_s
        self._kept.setdefault(kind, {})[name] = _Kept(Record(version + 1, text), expires_s)
        heappush(self._ends, (expires_s, kind, name))
        return True

    async def read(self, kind: str, name: str) -> Record | None:
        self._expire()
        kept = self._kept.get(kind, {}).get(name)
        return kept.record if kept else None

    async def read_all(self, kind: str) -> Mapping[str, Record]:
        self._expire()
        return {name: kept.record for name, kept in sorted(self._kept.get(kind, {}).items())}

    async def delete(self, kind: str, name: str) -> bool:
        self._expire()
        return self._kept.get(kind, {}).pop(name, None) is not None

    def _expire(self) -> None:
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            _, kind, name = heappop(self._ends)
            kept = self._kept[kind].get(name)
            if kept is not None and kept.expires_s <= now_s:
                del self._kept[kind][name]
