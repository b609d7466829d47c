"""PURE. Which of the requests that wait in line go where, now. For shells that keep one line per model: a gateway, the simulator.

A shell calls `bind` whenever a request comes, memory is freed, or an instance's report changes otherwise; it carries the bindings out
(one atomic claim each; a binding whose claim fails is void) and calls again, with a new view, until nothing is bound.

Late binding with backfill, one request after the other in the line's order (tier, then arrival):

1. A request *fits* an instance if its prompt does, beside everything that is queued there, and enough stays free for what the n requests
   there will write: growth * E * sqrt(n), E being the usual length of answers (n answers of unknown ends differ from their mean by about
   E sqrt(n)). It is bound to the cheapest such instance (price.py), or to the freest.
2. A *head* is a request that fits nowhere. At most `ahead` heads are bound ahead of room: there they stand at the head of the queue, that
   makes the instance a source of migrations, and closes it to others until they have started. They go where most room can be made: what
   is free, and what its requests, taken to be equally long, leave when they move into the gaps that the other instances have. Many short
   requests find gaps everywhere, a few long ones find none.
3. Later requests that fit pass heads (*backfill*). A head may be bound ahead beyond the limit by one for each `age_step_s` that it has
   waited, as long as no more than `aged_share` of the instances are closed in that way: the longer requests wait, the more of the cluster
   is theirs, and never all of it.
4. What was preempted stands back: it counts as come `stand_back_s` later than it did. It is long by then and its client reads already; in
   the room it takes to come back many start who have seen nothing yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from random import Random
from typing import Literal, Protocol

from backend.registry.store import Candidate
from gateway.policy.dispatch import DispatchPolicy, LeastLoaded, eligible
from gateway.policy.seat import CLOSED, Seat, SeatMemory
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, RequestView
from migration.leg import InstanceId, RequestId

COMPARED = 16
"""Instances, those with most room, that are looked at to bind a head ahead: what it takes grows with the product of these and all."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in line. `tokens` is the memory it needs to start: its prompt and what it had generated, if it ran before."""

    view: RequestView
    tokens: int
    arrived_s: float
    again: bool = False
    """It ran before, and was preempted."""
    rank: int = 0
    """Of its tier, if tiers count."""


def demand_tokens(request: RequestView, cluster: ClusterView) -> int:
    """What it needs to start, as far as any instance could give it: an estimate beyond that is for the engine to judge."""
    largest = 0
    for view in cluster.instances:
        if view.serves(request.model):
            largest = max(largest, min(view.report.capacity_tokens, view.report.max_model_tokens))
            if largest >= request.prompt_tokens:
                return request.prompt_tokens
    return largest or request.prompt_tokens


@dataclass(frozen=True, slots=True)
class LineView:
    """The line, in order. `ahead` counts requests that were bound ahead of room and have not started yet."""

    waiting: Sequence[Waiting]
    now_s: float
    ahead: int = 0
    expected_output_tokens: float = 256.0
    alternatives: int = 0
    """How many other instances a binding is to name."""


@dataclass(frozen=True, slots=True)
class Binding:
    """That request there, as long as the instance has no more than `claims_seen` claims. `ahead`: there is no room for it yet."""

    request: RequestId
    instance: InstanceId
    claims_seen: int
    ahead: bool = False
    others: tuple[Candidate, ...] = ()
    """The next best, for whom the first is taken from meanwhile."""


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


class _Remembering:
    """Room for what need not be made again for each request. No part of a policy's value."""

    __slots__ = ("_seats",)


@dataclass(frozen=True, slots=True)
class LateBinding(_Remembering):
    """See above. `age_step_s` 0: nobody is bound ahead beyond the limit."""

    tiers: Tiers = field(default_factory=Tiers)
    growth: float = 0.5
    ahead: int = 1
    age_step_s: float = 20.0
    aged_share: float = 0.25
    stand_back_s: float = 20.0
    backfill: bool = True
    placement: Literal["price", "freeness"] = "price"
    gap_keep_tokens: float | None = None
    """Of an instance's free memory, what moves leave for each of its requests; None: nothing moves."""

    def bind(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        if not line.waiting:
            return ()
        growth_tokens = self.growth * line.expected_output_tokens
        seats = self._memory().seats(cluster.instances, growth_tokens)
        if not seats or not all(seat.is_measured for seat in seats):
            return self._bind_blindly(line, cluster, rng)
        bindings: list[Binding] = []
        closed = line.ahead
        aged_limit = max(self.ahead, int(self.aged_share * len(seats)))
        room = max(seat.room for seat in seats)
        for waiting in self._in_turn(line.waiting):
            fitting = self._fitting(waiting, seats, line, rng) if waiting.tokens <= room else ()
            if fitting:
                bindings.append(self._take(seats, fitting, waiting, growth_tokens, ahead=False))
                if len(bindings) == len(line.waiting):
                    break
                room = max(seat.room for seat in seats)
                if room <= 0 and closed >= aged_limit:
                    break
                continue
            if closed < min(aged_limit, self._ahead_at(waiting, line.now_s)):
                clearest = self._clearest(waiting, seats, rng)
                if clearest is not None:
                    bindings.append(self._take(seats, (clearest,), waiting, growth_tokens, ahead=True))
                    room = max(seat.room for seat in seats)
                    closed += 1
                    continue
            if not self.backfill:
                break
        return bindings

    def _in_turn(self, line: Sequence[Waiting]) -> Sequence[Waiting]:
        """The order in which they are looked at: what was preempted stands back, but never behind a tier of a higher rank."""
        if not self.stand_back_s or not any(waiting.again for waiting in line):
            return line
        return sorted(line, key=lambda waiting: (waiting.rank, self._turn_s(waiting)))

    def _turn_s(self, waiting: Waiting) -> float:
        return waiting.arrived_s + (self.stand_back_s if waiting.again else 0.0)

    def _memory(self) -> SeatMemory:
        memory: SeatMemory | None = getattr(self, "_seats", None)
        if memory is None:
            memory = SeatMemory(self.tiers)
            object.__setattr__(self, "_seats", memory)
        return memory

    def _ahead_at(self, waiting: Waiting, now_s: float) -> int:
        """How many heads may be bound ahead, this one included, for it to be bound ahead. One that was preempted has to wait for that."""
        aged = int((now_s - self._turn_s(waiting)) / self.age_step_s if self.age_step_s else 0)
        return aged if waiting.again else self.ahead + aged

    def _fitting(self, waiting: Waiting, seats: Sequence[Seat], line: LineView, rng: Random) -> Sequence[int]:
        """The cheapest seat where it fits, and the `alternatives` next to it; among equals the freest, with fewest claims, by lot."""
        tokens, model, excluded, lot = waiting.tokens, waiting.view.model, waiting.view.excluded, rng.random
        weight, steps = self.tiers.find(waiting.view.tier).weight, line.expected_output_tokens
        priced = self.placement == "price"
        found = [
            (seat.price_s(weight, tokens, steps) if priced else 0.0, seat.crowding, seat.claims, lot(), at)
            for at, seat in enumerate(seats)
            if seat.room >= tokens and (model is None or model in seat.models) and not (excluded and seat.view.report.instance in excluded)
        ]
        if line.alternatives:
            return [at for *_, at in nsmallest(1 + line.alternatives, found)]
        return (min(found)[-1],) if found else ()

    def _clearest(self, waiting: Waiting, seats: Sequence[Seat], rng: Random) -> int | None:
        """Where a head is bound ahead: nothing queued, large enough at all, and the most room to be made. Not where others were bound in
        this pass: until their gateways have claimed it for them, a head would take it from them."""
        candidates = [
            (-seat.room, seat.claims, rng.random(), at)
            for at, seat in enumerate(seats)
            if seat.room > CLOSED
            and seat.claims == seat.view.claims
            and not seat.view.report.waiting
            and seat.view.report.capacity_tokens >= waiting.tokens
            and seat.claims < seat.view.report.max_batch
            and seat.view.serves(waiting.view.model)
            and seat.view.id not in waiting.view.excluded
        ]
        if self.gap_keep_tokens is None or len(candidates) < 2:
            return min(candidates)[-1] if candidates else None
        gaps = [(seat.models, seat.vacancy.free_tokens - self.gap_keep_tokens * seat.running) for seat in seats]
        ranked: list[tuple[float, int, float, int]] = []
        for _, claims, lot, at in nsmallest(COMPARED, candidates):
            around = [gap for place, (models, gap) in enumerate(gaps) if place != at and models == seats[at].models]
            ranked.append((-seats[at].clearable_tokens(around), claims, lot, at))
        return min(ranked)[-1]

    def _take(self, seats: list[Seat], found: Sequence[int], waiting: Waiting, growth_tokens: float, *, ahead: bool) -> Binding:
        """Bind it to the first that was found, and count it there."""
        best, *others = ((seats[at].view.report.instance, seats[at].claims) for at in found)
        weight = self.tiers.find(waiting.view.tier).weight
        seats[found[0]] = seats[found[0]].taken(waiting.tokens, weight, growth_tokens, ahead=ahead)
        return Binding(waiting.view.request, *best, ahead, tuple(Candidate(*other) for other in others))

    def _bind_blindly(self, line: LineView, cluster: ClusterView, rng: Random) -> Sequence[Binding]:
        """Nobody reports, or of some nothing is known: by outstanding requests, up to each instance's batch."""
        for waiting in line.waiting:
            limits = {view.id: view.report.max_batch for view in eligible(waiting.view, cluster)}
            order = LeastLoaded().order(waiting.view, cluster, rng)
            free = [candidate for candidate in order if candidate.claims_seen < limits[candidate.instance]]
            if free:
                best, others = free[0], tuple(free[1 : 1 + line.alternatives])
                return (Binding(waiting.view.request, best.instance, best.claims_seen, others=others),)
        return ()
