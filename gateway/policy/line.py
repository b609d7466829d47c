"""PURE. Which of the requests that wait in line go where, now. For shells that keep one line per model: a gateway, the simulator.

A shell calls `bind` whenever a request comes, memory is freed, or an instance's report changes otherwise; it carries the bindings out
(one atomic claim each; a binding whose claim fails is void) and calls again, with a new view, until nothing is bound.

Late binding with backfill, one request after the other in the line's order (tier, then arrival):

1. A request *fits* an instance if its prompt does, beside everything that is queued there, and enough stays free for what the requests
   there will write: `reserve_blocks` for each of the n, at least `watermark` of the memory, and at least growth * E * sqrt(n), E being the
   usual length of answers (n answers of unknown ends differ from their mean by about E sqrt(n)). It is bound to the cheapest such
   instance (price.py), or to the freest.
2. A *head* is a request that fits nowhere. At most `ahead` heads are bound ahead of room, to the instance with most room: there they stand
   at the head of the queue, that makes the instance a source of migrations, and closes it to others until they have started.
3. Later requests that fit pass heads (*backfill*). A head may be bound ahead beyond the limit by one for each `age_step_s` that it has
   waited, as long as no more than `aged_share` of the instances are closed in that way: the longer requests wait, the more of the cluster
   is theirs, and never all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

from backend.registry.instance import LoadReport, StepCost
from gateway.policy.dispatch import DispatchPolicy, LeastLoaded, Vacancy, eligible
from gateway.policy.load import standing
from gateway.policy.price import placement_cost_s
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, InstanceView, RequestView, ViewState
from migration.choice import Standing as Totals
from migration.leg import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in line. `tokens` is the memory it needs to start: its prompt and what it had generated, if it ran before."""

    view: RequestView
    tokens: int
    arrived_s: float


def demand_tokens(request: RequestView, cluster: ClusterView) -> int:
    """What it needs to start, as far as any instance could give it: an estimate beyond that is for the engine to judge."""
    largest = max(
        (min(view.report.capacity_tokens, view.report.max_model_tokens) for view in cluster.instances if view.serves(request.model)),
        default=request.prompt_tokens,
    )
    return min(request.prompt_tokens, largest)


@dataclass(frozen=True, slots=True)
class LineView:
    """The line, in order. `ahead` counts requests that were bound ahead of room and have not started yet."""

    waiting: Sequence[Waiting]
    now_s: float
    ahead: int = 0
    expected_output_tokens: float = 256.0


@dataclass(frozen=True, slots=True)
class Binding:
    """That request there, as long as the instance has `claims_seen` claims. `ahead`: there is no room for it yet."""

    request: RequestId
    instance: InstanceId
    claims_seen: int
    ahead: bool = False


class LinePolicy(Protocol):
    """The shape of every policy of a line."""

    def bind(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        """Some requests' places. Empty: nothing is to be bound until something changes."""


@dataclass(frozen=True, slots=True)
class Immediate:
    """Nobody waits in line: the first request goes where a dispatch policy says; the next one with the next view."""

    dispatch: DispatchPolicy

    def bind(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        for waiting in line.waiting:
            order = self.dispatch.order(waiting.view, cluster, rng)
            if order:
                return (Binding(waiting.view.request, order[0].instance, order[0].claims_seen),)
        return ()


@dataclass(slots=True)
class _Seat:
    """One instance while bindings are being made: what is left of it."""

    view: InstanceView
    cost: StepCost
    room: int
    claims: int
    requests: int
    running: int
    tokens: int
    weight: float
    tie: float

    @property
    def id(self) -> InstanceId:
        return self.view.report.instance


@dataclass(frozen=True, slots=True)
class _Sums:
    """What a seat is at first: all that depends on the report and the claims alone."""

    report: LoadReport
    claims: int
    claimed_tokens: int
    vacancy: Vacancy
    standing: Totals

    def are_of(self, view: InstanceView) -> bool:
        return self.report is view.report and self.claims == view.claims and self.claimed_tokens == view.claimed_tokens


class _Remembering:
    """Room for sums that need not be made again for each request. No part of a policy's value."""

    __slots__ = ("_sums",)


@dataclass(frozen=True, slots=True)
class LateBinding(_Remembering):
    """See above. `age_step_s` 0: nobody is bound ahead beyond the limit."""

    tiers: Tiers = field(default_factory=Tiers)
    reserve_blocks: int = 1
    watermark: float = 0.02
    growth: float = 0.4
    ahead: int = 1
    age_step_s: float = 20.0
    aged_share: float = 0.25
    backfill: bool = True
    placement: Literal["price", "freeness"] = "price"

    def bind(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        if not line.waiting:
            return ()
        growth_tokens = self.growth * line.expected_output_tokens
        seats = [self._seat(view, growth_tokens, rng) for view in cluster.instances if view.state is ViewState.READY]
        if not all(seat.view.report.is_measured for seat in seats) or not seats:
            return self._bind_blindly(line, cluster, rng)
        bindings: list[Binding] = []
        closed = line.ahead
        aged_limit = max(self.ahead, int(self.aged_share * len(seats)))
        room = max(seat.room for seat in seats)
        for waiting in line.waiting:
            seat = self._fitting(waiting, seats, line) if waiting.tokens <= room else None
            if seat is not None:
                bindings.append(self._take(seat, waiting, ahead=False))
                room = max(each.room for each in seats)
                if room <= 0 and closed >= aged_limit:
                    break
                continue
            if closed < min(aged_limit, self._ahead_at(line.now_s - waiting.arrived_s)):
                seat = self._roomiest(waiting, seats)
                if seat is not None:
                    bindings.append(self._take(seat, waiting, ahead=True))
                    room = max(each.room for each in seats)
                    closed += 1
                    continue
            if not self.backfill:
                break
        return bindings

    def _ahead_at(self, age_s: float) -> int:
        """How many heads may be bound ahead, this one included, for one of that age to be bound ahead."""
        return self.ahead + int(age_s / self.age_step_s if self.age_step_s else 0)

    def _seat(self, view: InstanceView, growth_tokens: float, rng: Random) -> _Seat:
        sums = self._sums_of(view)
        all_of = sums.standing
        room = sums.vacancy.room_tokens(view.report, self.reserve_blocks, self.watermark, growth_tokens)
        return _Seat(view, view.report.cost, room, view.claims, all_of.requests, all_of.running, all_of.tokens, all_of.weight, rng.random())

    def _sums_of(self, view: InstanceView) -> _Sums:
        known: dict[InstanceId, _Sums] | None = getattr(self, "_sums", None)
        if known is None or len(known) > _REMEMBERED:
            known = {}
            object.__setattr__(self, "_sums", known)
        sums = known.get(view.report.instance)
        if sums is None or not sums.are_of(view):
            sums = _Sums(view.report, view.claims, view.claimed_tokens, Vacancy.of(view), standing(view, self.tiers))
            known[view.report.instance] = sums
        return sums

    def _fitting(self, waiting: Waiting, seats: Sequence[_Seat], line: LineView) -> _Seat | None:
        """The cheapest seat where it fits; among equals the freest, then the one with fewest claims, then by lot."""
        best: tuple[float, float, int, float] | None = None
        chosen = None
        own_weight = self.tiers.find(waiting.view.tier).weight
        for seat in seats:
            if seat.room < waiting.tokens or not _serves(seat, waiting.view):
                continue
            price_s = 0.0
            if self.placement == "price":
                price_s = placement_cost_s(
                    seat.cost,
                    tokens=seat.tokens,
                    requests=seat.requests,
                    weight=seat.weight,
                    prompt_tokens=waiting.tokens,
                    own_weight=own_weight,
                    steps=line.expected_output_tokens,
                )
            key = (price_s, -seat.room / max(1, seat.running), seat.claims, seat.tie)
            if best is None or key < best:
                best, chosen = key, seat
        return chosen

    def _roomiest(self, waiting: Waiting, seats: Sequence[_Seat]) -> _Seat | None:
        """Where a head is bound ahead: nothing queued, large enough at all, and the most room."""
        candidates = [
            seat
            for seat in seats
            if seat.room > _CLOSED
            and not seat.view.report.waiting
            and seat.view.report.capacity_tokens >= waiting.tokens
            and seat.claims < seat.view.report.max_batch
            and _serves(seat, waiting.view)
        ]
        return max(candidates, key=lambda seat: (seat.room, -seat.claims, seat.tie), default=None)

    def _take(self, seat: _Seat, waiting: Waiting, *, ahead: bool) -> Binding:
        """Bind it there, and count it."""
        binding = Binding(waiting.view.request, seat.id, seat.claims, ahead)
        block = seat.view.report.block_tokens
        demand = -(-waiting.tokens // block) * block + self.reserve_blocks * block
        seat.room = _CLOSED if ahead else seat.room - demand
        seat.claims += 1
        seat.requests += 1
        seat.running += 1
        seat.tokens += waiting.tokens
        seat.weight += self.tiers.find(waiting.view.tier).weight
        if seat.claims >= seat.view.report.max_batch:
            seat.room = _CLOSED
        return binding

    def _bind_blindly(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        """Nobody reports, or of some nothing is known: by outstanding requests, up to each instance's batch."""
        for waiting in line.waiting:
            limits = {view.id: view.report.max_batch for view in eligible(waiting.view, cluster)}
            for candidate in LeastLoaded().order(waiting.view, cluster, rng):
                if candidate.claims_seen < limits[candidate.instance]:
                    return (Binding(waiting.view.request, candidate.instance, candidate.claims_seen),)
        return ()


_CLOSED = -(2**62)
_REMEMBERED = 4096


def _serves(seat: _Seat, request: RequestView) -> bool:
    return seat.view.serves(request.model) and seat.id not in request.excluded
