"""The line: requests that wait for an instance. One line per model, shared by all gateways; the connection waits in its own gateway.

A line is ordered by rank (lower first), then by arrival, as the store counts arrivals. A place lives `ttl_s` unless it is renewed, and ends
with the claim of its request. A gateway that waits is told when it is worth looking again: when memory may have been freed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from migration.leg import InstanceId, RequestId

SHED_TTL_S = 10.0
"""How long it is remembered that a request was shed, for its gateway to see."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in line. `line` names the model; `tokens` is the memory it needs to start."""

    request: RequestId
    line: str
    gateway: str
    tier: str
    rank: int
    tokens: int
    excluded: tuple[InstanceId, ...] = ()
    """Instances it must not go to."""
    again: bool = False
    """It ran before, and was preempted."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A ticket and how long it has been in line, by the store's clock."""

    ticket: Ticket
    waited_s: float


@dataclass(frozen=True, slots=True)
class LineLimits:
    """How many may wait when a newcomer joins. `of_tier`: of its own tier, None: any number. `of_line`: of all tiers together; if that is
    reached, the last request of the first tier in `shed_first` that is in line makes room."""

    of_tier: int | None
    of_line: int
    shed_first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LineSight:
    """A line as it is now."""

    standings: Sequence[Standing]
    """Its beginning, in order."""
    waiting: Mapping[str, int]
    """How many wait in all, by tier."""
    ahead: int
    """Claims that were made ahead of room and have not started."""
    bound: int
    """Requests that left this line for an instance, ever: a counter."""
    shed: frozenset[RequestId]
    """Of late."""


@dataclass(frozen=True, slots=True)
class Passage:
    """How a claim stands to a line. Who is not in line does not pass those of its own rank or a better one that are.

    `ahead`: there is no room for it yet; it counts as such until it has started."""

    line: str
    rank: int
    ahead: bool = False


class Bell(Protocol):
    """Rings when a line may have moved."""

    async def wait(self) -> None:
        """Return when it has rung since the last call returned. Raises StoreError if it is broken."""


class LineStore(Protocol):
    """Every failure is a StoreError. (Claims, which take a request out of line, are made at the InstanceStore.)"""

    async def join(self, ticket: Ticket, limits: LineLimits, ttl_s: float) -> bool:
        """Take a place. False if the line is full. Who is in line already keeps the place, for another `ttl_s`."""

    async def leave(self, request: RequestId) -> bool:
        """Give a place up. True if there was one."""

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        """Prolong these places; answers those that do not exist any more."""

    async def look(self, line: str, limit: int) -> LineSight:
        """The line, and its first `limit` places."""

    async def started(self, request: RequestId) -> bool:
        """A request that was claimed ahead of room runs now. True the first time."""

    def listen(self) -> AbstractAsyncContextManager[Bell]:
        """Hear of urgent reports, claims given back and places given up, as long as somebody waits in line."""


@dataclass(frozen=True, slots=True)
class _Place:
    ticket: Ticket
    number: int
    arrived_s: float
    expires_s: float

    @property
    def key(self) -> tuple[int, int]:
        return self.ticket.rank, self.number


class _Event:
    """A Bell in one process."""

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    async def wait(self) -> None:
        await self.rung.wait()
        self.rung.clear()


class MemoryLine:
    """A LineStore in one process; `clock` gives seconds that never go back. Its second half is for the store of claims
    beside it."""

    def __init__(self, clock: Callable[[], float], expire_claims: Callable[[], object]) -> None:
        self._clock = clock
        self._expire_claims = expire_claims
        self._places: dict[RequestId, _Place] = {}
        self._ahead: dict[RequestId, str] = {}
        self._bound: dict[str, int] = {}
        self._shed: dict[RequestId, tuple[str, float]] = {}
        self._number = 0
        self._bells: set[_Event] = set()

    async def join(self, ticket: Ticket, limits: LineLimits, ttl_s: float) -> bool:
        now_s = self.expire()
        known = self._places.get(ticket.request)
        if known is not None:
            self._places[ticket.request] = _Place(known.ticket, known.number, known.arrived_s, now_s + ttl_s)
            return True
        here = [place for place in self._places.values() if place.ticket.line == ticket.line]
        if limits.of_tier is not None and sum(place.ticket.tier == ticket.tier for place in here) >= limits.of_tier:
            return False
        if len(here) >= limits.of_line and not self._make_room(here, limits.shed_first, now_s):
            return False
        self._number += 1
        self._shed.pop(ticket.request, None)
        self._places[ticket.request] = _Place(ticket, self._number, now_s, now_s + ttl_s)
        return True

    async def leave(self, request: RequestId) -> bool:
        self.expire()
        left = self._places.pop(request, None) is not None
        if left:
            self.ring()
        return left

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        now_s = self.expire()
        for request in requests:
            place = self._places.get(request)
            if place is not None:
                self._places[request] = _Place(place.ticket, place.number, place.arrived_s, now_s + ttl_s)
        return [request for request in requests if request not in self._places]

    async def look(self, line: str, limit: int) -> LineSight:
        self._expire_claims()
        now_s = self.expire()
        here = sorted((place for place in self._places.values() if place.ticket.line == line), key=lambda place: place.key)
        waiting: dict[str, int] = {}
        for place in here:
            waiting[place.ticket.tier] = waiting.get(place.ticket.tier, 0) + 1
        return LineSight(
            standings=[Standing(place.ticket, now_s - place.arrived_s) for place in here[:limit]],
            waiting=waiting,
            ahead=sum(name == line for name in self._ahead.values()),
            bound=self._bound.get(line, 0),
            shed=frozenset(request for request, (name, _) in self._shed.items() if name == line),
        )

    async def started(self, request: RequestId) -> bool:
        was_ahead = self._ahead.pop(request, None) is not None
        if was_ahead:
            self.ring()
        return was_ahead

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[Bell]:
        bell = _Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)

    # -- for the store of claims

    def ring(self) -> None:
        """If anybody waits."""
        if self._places:
            for bell in self._bells:
                bell.rung.set()

    def may_pass(self, request: RequestId, passage: Passage) -> bool:
        """Whether it may be claimed although others wait."""
        self.expire()
        if request in self._places:
            return True
        return not any(place.ticket.line == passage.line and place.ticket.rank <= passage.rank for place in self._places.values())

    def bind(self, request: RequestId, passage: Passage | None) -> None:
        """It has been claimed."""
        place = self._places.pop(request, None)
        if place is not None:
            self._bound[place.ticket.line] = self._bound.get(place.ticket.line, 0) + 1
        if passage is not None and passage.ahead:
            self._ahead[request] = passage.line

    def forget(self, request: RequestId) -> None:
        """Its claim is over, or elsewhere."""
        self._ahead.pop(request, None)

    def expire(self) -> float:
        """Drop what has expired; answers the time."""
        now_s = self._clock()
        for request in [request for request, place in self._places.items() if place.expires_s <= now_s]:
            del self._places[request]
            self.ring()
        for request in [request for request, (_, expires_s) in self._shed.items() if expires_s <= now_s]:
            del self._shed[request]
        return now_s

    def _make_room(self, here: Sequence[_Place], shed_first: Sequence[str], now_s: float) -> bool:
        """Shed one request of these tiers."""
        for tier in shed_first:
            of_tier = [place for place in here if place.ticket.tier == tier]
            if of_tier:
                last = max(of_tier, key=lambda place: place.key).ticket
                del self._places[last.request]
                self._shed[last.request] = (last.line, now_s + SHED_TTL_S)
                self.ring()
                return True
        return False
