"""Streams that clients may go on reading at another gateway: what each was asked, and its tokens; one owner at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KeptStream:
    """`term` counts the owners, from 1; `request` is the owners' own document; `created` the second that clients were shown."""

    owner: str
    term: int
    request: str
    created: int | None = None
    tokens: Sequence[int] = ()


class Appended(Enum):
    """What became of an owner's tokens."""

    KEPT = "kept"
    TAKEN = "taken"
    """Another owner has the stream."""
    GONE = "gone"
    """The store knows nothing of it, or less than its owner thinks: begin again."""


class StreamStore(Protocol):
    """Streams by name; each ends `ttl_s` after it was last changed. Every call may safely run twice. Every failure is a StoreError."""

    async def begin(self, name: str, stream: KeptStream, ttl_s: float) -> bool:
        """Keep a stream, from its first token on. False if another owner has one of that name."""

    async def append(self, name: str, owner: str, at: int, tokens: Sequence[int], created: int | None, ttl_s: float) -> Appended:
        """From number `at` on its tokens are these."""

    async def read(self, name: str) -> KeptStream | None:
        """All of it."""

    async def take(self, name: str, owner: str, to: str, ttl_s: float) -> int | None:
        """Give it to another owner; answers the new term. None if it is not (any more) that owner's."""


@dataclass(frozen=True, slots=True)
class _Kept:
    stream: KeptStream
    expires_s: float


class MemoryStreams:
    """A StreamStore in one process; `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    async def begin(self, name: str, stream: KeptStream, ttl_s: float) -> bool:
        present = await self.read(name)
        if present is not None and present.owner != stream.owner:
            return False
        self._keep(name, replace(stream, tokens=()), ttl_s)
        return True

    async def append(self, name: str, owner: str, at: int, tokens: Sequence[int], created: int | None, ttl_s: float) -> Appended:
        present = await self.read(name)
        if present is None:
            return Appended.GONE
        if present.owner != owner:
            return Appended.TAKEN
        if len(present.tokens) < at:
            return Appended.GONE
        known = created if created is not None else present.created
        self._keep(name, replace(present, tokens=(*present.tokens[:at], *tokens), created=known), ttl_s)
        return Appended.KEPT

    async def read(self, name: str) -> KeptStream | None:
        now_s = self._clock()
        for one in [one for one, kept in self._kept.items() if kept.expires_s <= now_s]:
            del self._kept[one]
        kept = self._kept.get(name)
        return kept.stream if kept else None

    async def take(self, name: str, owner: str, to: str, ttl_s: float) -> int | None:
        present = await self.read(name)
        if present is None or present.owner not in (owner, to):
            return None
        if present.owner != to:
            present = replace(present, owner=to, term=present.term + 1)
        self._keep(name, present, ttl_s)
        return present.term

    def _keep(self, name: str, stream: KeptStream, ttl_s: float) -> None:
        self._kept[name] = _Kept(stream, self._clock() + ttl_s)
