"""PURE. Which instances give running requests to which, decided from sums alone; the source chooses the request (migration/choice.py).

1. *Memory*: sources have a freeness below `out_tokens`, destinations above `in_tokens`; the lowest source is paired with the highest
   destination, the next with the next. A pair is worked on, one request at a time, until the next round of pairing. A source whose
   queue's head has no room may give to destinations above `unblock_tokens` already: below what newcomers leave free there, so that
   what the whole cluster keeps free for growth makes room for a long prompt.
2. *Queue*: a request that stands at the head of a queue and has no memory there goes, without blocks, to an instance where it starts at
   once. It comes before memory: it costs nothing.
3. *Release*: a request that has lost its memory, and waits for more of it than its instance has, goes back to the line. What it leaves
   free is others' at once; where it waited it kept all of that to itself, and lost it again to its neighbours' growth.
4. *Price*: what is left (no queue and no migration at the destination) is offered to every other source as sums; each answers with its best
   move to each; the largest gain is granted first, at most one out and one in per instance.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isinf

from gateway.policy.dispatch import room_tokens
from gateway.policy.load import Targets, rebalance_freeness, standing
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, InstanceView, ViewState
from migration.choice import Move, PriceRule, Standing
from migration.leg import InstanceId

WATERMARK = 0.01
"""The share of its memory that an engine may keep free when it lets requests in."""


class Reason(StrEnum):
    """Why requests move."""

    MEMORY = "memory"
    DRAINING = "draining"
    """The source must get empty: its requests move even if the destination ends up less free."""
    QUEUE = "queue"
    RELEASE = "release"
    """It goes back to the line."""
    PRICE = "price"


@dataclass(frozen=True, slots=True)
class Pair:
    """Move requests from the source to the destination, for a while."""

    source: InstanceId
    destination: InstanceId
    reason: Reason = Reason.MEMORY


@dataclass(frozen=True, slots=True)
class Offer:
    """What the price step asks a source: its best move to each of these."""

    source: Standing
    destinations: tuple[Standing, ...]
    rule: PriceRule


@dataclass(frozen=True, slots=True)
class Grant:
    """That move is to be made."""

    source: InstanceId
    move: Move


@dataclass(frozen=True, slots=True)
class FreenessPairing:
    """The memory step."""

    out_tokens: float = 48.0
    in_tokens: float = 48.0
    targets: Targets = field(default_factory=dict)
    unblock_tokens: float | None = None
    """None: as any other source."""

    def pairs(self, cluster: ClusterView) -> Sequence[Pair]:
        """This round's pairs, the neediest source first. Only fresh instances are paired; a draining one only gives."""
        known = [
            (rebalance_freeness(view, self.targets), view.id, view)
            for view in cluster.instances
            if view.state in (ViewState.READY, ViewState.DRAINING) and view.can_move
        ]
        sources = sorted((each for each in known if each[0] < self.out_tokens and each[2].claims), key=lambda each: each[:2])
        takers = sorted(known, key=lambda each: (-each[0], each[1]))
        return [
            Pair(source[1], taker[1], Reason.DRAINING if isinf(source[0]) else Reason.MEMORY)
            for source, taker in zip(sources, takers, strict=False)
            if taker[0] > max(source[0], self._least(source[2]))
        ]

    def _least(self, source: InstanceView) -> float:
        """What a destination must be freer than to take from that source."""
        if self.unblock_tokens is None or not _is_blocked(source):
            return self.in_tokens
        return min(self.in_tokens, self.unblock_tokens)


@dataclass(frozen=True, slots=True)
class QueueStep:
    """The queue step. Nothing waits at a destination."""

    def pairs(self, cluster: ClusterView) -> Sequence[Pair]:
        """Each blocked head with the instance that has most room for it, the longest waiting first; no instance twice."""
        blocked = sorted(
            (view for view in cluster.instances if _is_blocked(view)), key=lambda view: (-view.report.oldest_waiting_s, view.id)
        )
        if not blocked:
            return ()
        takers = [
            view
            for view in cluster.instances
            if view.state is ViewState.READY and not view.report.waiting and not view.report.migrations_in
        ]
        rooms = sorted(((room_tokens(view), view.id) for view in takers), key=lambda each: (-each[0], each[1]))
        return [
            Pair(source.id, taker, Reason.QUEUE)
            for source, (room, taker) in zip(blocked, rooms, strict=False)
            if room >= source.report.head_tokens
        ]


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """The release step. Requests of fewer than `least_tokens` keep their place: they start again soon."""

    least_tokens: int = 256
    interval_s: float = 0.05
    """Between two looks: what such a request keeps free is lost meanwhile."""

    def sources(self, cluster: ClusterView) -> Sequence[InstanceId]:
        """Instances that are asked whom of their queue they let go: those whose head has no room."""
        return [view.id for view in cluster.instances if _is_blocked(view) and view.can_move]


@dataclass(frozen=True, slots=True)
class PriceStep:
    """The price step. `threshold_s` is theta; `keep_blocks` is kept free per request at the destination."""

    tiers: Tiers = field(default_factory=Tiers)
    threshold_s: float = 0.005
    keep_blocks: int = 10

    def offers(self, cluster: ClusterView, busy_out: frozenset[InstanceId], busy_in: frozenset[InstanceId]) -> Sequence[Offer]:
        """Ask whom for what. `busy_out` and `busy_in` take part in a migration already."""
        ready = [(view, standing(view, self.tiers)) for view in cluster.instances if view.state is ViewState.READY and view.can_move]
        takers = [sums for view, sums in ready if not view.report.waiting and view.id not in busy_in and view.id not in busy_out]
        lightest = min(tier.weight for tier in self.tiers.tiers)
        offers = []
        for view, sums in ready:
            if view.id in busy_out or not view.report.running:
                continue
            rule = self._rule(view)
            worth = tuple(each for each in takers if each.instance != view.id and _may_gain(sums, each, rule, lightest))
            if worth:
                offers.append(Offer(sums, worth, rule))
        return offers

    def grants(self, answers: Mapping[InstanceId, Iterable[Move]]) -> Sequence[Grant]:
        """The moves to make, by gain. One out and one in per instance, and nobody does both."""
        ranked = sorted(
            ((move.gain_s, source, move) for source, moves in answers.items() for move in moves),
            key=lambda each: (-each[0], each[1], each[2].destination),
        )
        taken: set[InstanceId] = set()
        granted = []
        for _, source, move in ranked:
            if source not in taken and move.destination not in taken:
                taken |= {source, move.destination}
                granted.append(Grant(source, move))
        return granted

    def _rule(self, view: InstanceView) -> PriceRule:
        cost = view.report.cost
        return PriceRule(cost.per_token_s, cost.per_request_s, self.threshold_s, self.keep_blocks * view.report.block_tokens)


def pools(cluster: ClusterView) -> Sequence[ClusterView]:
    """The instances that can exchange requests: those that serve the same models."""
    by_models: dict[tuple[str, ...], list[InstanceView]] = {}
    for view in cluster.instances:
        by_models.setdefault(view.report.models, []).append(view)
    return [ClusterView(tuple(views)) for _, views in sorted(by_models.items())]


def _is_blocked(view: InstanceView) -> bool:
    """Its head waits for memory, or for a place in the batch."""
    report = view.report
    if not report.waiting or view.state not in (ViewState.READY, ViewState.DRAINING):
        return False
    return report.head_tokens > report.free_tokens - WATERMARK * report.capacity_tokens or report.running >= report.max_batch


def _may_gain(source: Standing, destination: Standing, rule: PriceRule, lightest: float) -> bool:
    """False if no request whatever could gain there."""
    own = rule.per_token_s * (source.tokens - destination.tokens) + rule.per_request_s * (source.requests - destination.requests - 1)
    return own > rule.threshold_s or source.weight - destination.weight > lightest
