"""PURE. Where a new request goes at once. A policy is a value with one method, `order`: the instances to try to claim, best first.

(Policies that let requests wait for room are in line.py.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from typing import Literal, Protocol

from backend.registry.instance import LoadReport
from backend.registry.store import Candidate
from gateway.policy.load import dispatch_freeness, standing, unseen
from gateway.policy.price import placement_cost_s
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, InstanceView, RequestView, ViewState


class DispatchPolicy(Protocol):
    """The shape of every dispatch policy."""

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        """Instances that can take the request, best first; empty if there is none."""


def eligible(request: RequestView, cluster: ClusterView) -> Sequence[InstanceView]:
    """Instances that serve the model, are ready, and have not failed the request.

    If the reports of all of them are stale, the fault is more likely in the reports than in all instances at once: use them all.
    """
    serving = [view for view in cluster.instances if view.serves(request.model) and view.id not in request.excluded]
    fresh = [view for view in serving if view.state is ViewState.READY]
    return fresh or [view for view in serving if view.state is ViewState.STALE]


def is_served(request: RequestView, cluster: ClusterView) -> bool:
    """Whether anybody is eligible."""
    return any(
        view.state in (ViewState.READY, ViewState.STALE) and view.serves(request.model) and view.id not in request.excluded
        for view in cluster.instances
    )


def is_comparable(request: RequestView, cluster: ClusterView) -> bool:
    """False if the memory of one of the instances is unknown: then only outstanding requests compare all of them."""
    return all(view.report.is_measured for view in eligible(request, cluster))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each in turn, by the request's number; from a random one on if nobody counts."""

    name: Literal["round_robin"] = "round_robin"

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        views = eligible(request, cluster)
        if not views:
            return ()
        first = (rng.randrange(len(views)) if request.sequence is None else request.sequence) % len(views)
        return tuple(Candidate(view.id, view.claims) for view in [*views[first:], *views[:first]])


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Fewest live claims; then fewest requests in the engine (running and waiting); then a fair random choice.

    Claims come first because they are counted the moment they are made, while a report is always a little old.
    """

    name: Literal["least_outstanding"] = "least_outstanding"

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        ranked = sorted(eligible(request, cluster), key=lambda view: (view.claims, view.report.running + view.report.waiting, rng.random()))
        return tuple(Candidate(view.id, view.claims) for view in ranked)


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """INFaaS++ of the paper: the smallest share of memory in use or waited for; then fewest claims; then a fair random choice."""

    name: Literal["infaas"] = "infaas"

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        if not is_comparable(request, cluster):
            return LeastLoaded().order(request, cluster, rng)
        ranked = sorted(eligible(request, cluster), key=lambda view: (_memory_load(view), view.claims, rng.random()))
        return tuple(Candidate(view.id, view.claims) for view in ranked)


@dataclass(frozen=True, slots=True)
class Freest:
    """Llumnix of the paper: the highest dispatch freeness; then fewest claims; then a fair random choice."""

    name: Literal["freest"] = "freest"
    targets: Mapping[str, int] = field(default_factory=dict)
    """Head-room, see load.Targets."""

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        if not is_comparable(request, cluster):
            return LeastLoaded().order(request, cluster, rng)
        ranked = sorted(eligible(request, cluster), key=lambda view: (-dispatch_freeness(view, self.targets), view.claims, rng.random()))
        return tuple(Candidate(view.id, view.claims) for view in ranked)


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The lowest price (price.py) among those where it fits without waiting; then, and if it fits nowhere, the highest freeness.

    An engine that has measured nothing yet costs nothing, so that a cluster of such engines goes by freeness.
    """

    name: Literal["cheapest"] = "cheapest"
    tiers: Tiers = field(default_factory=Tiers)

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        if not is_comparable(request, cluster):
            return LeastLoaded().order(request, cluster, rng)
        weight = self.tiers.find(request.tier).weight

        def rank(view: InstanceView) -> tuple[bool, float, float, int, float]:
            fits = room_tokens(view) >= request.prompt_tokens
            sums = standing(view, self.tiers)
            price_s = placement_cost_s(
                view.report.cost,
                tokens=sums.tokens,
                requests=sums.requests,
                weight=sums.weight,
                prompt_tokens=request.prompt_tokens,
                own_weight=weight,
                steps=request.expected_output_tokens,
            )
            return not fits, price_s if fits else 0.0, -dispatch_freeness(view, {}), view.claims, rng.random()

        return tuple(Candidate(view.id, view.claims) for view in sorted(eligible(request, cluster), key=rank))


@dataclass(frozen=True, slots=True)
class Vacancy:
    """What an instance has left once everything that is queued there, or on its way there, has started. Negative if that does not fit."""

    free_tokens: int
    requests: int

    @staticmethod
    def of(view: InstanceView) -> "Vacancy":
        """As the report and the claims have it."""
        report = view.report
        coming, coming_tokens = unseen(view)
        return Vacancy(report.free_tokens - report.waiting_tokens - coming_tokens, report.running + report.waiting + coming)

    def room_tokens(self, report: LoadReport, growth_tokens: float = 0.0) -> int:
        """Tokens a newcomer may bring so that it starts at once, and so that `growth_tokens` times the root of the number of requests, the
        newcomer included, stay free (but no more than MOST_FOR_GROWTH of the capacity). Negative if there are none."""
        if self.requests >= report.max_batch:
            return -1
        free = self.free_tokens
        if self.requests:
            free -= int(min(growth_tokens * sqrt(self.requests + 1), MOST_FOR_GROWTH * report.capacity_tokens))
        return free // report.block_tokens * report.block_tokens


MOST_FOR_GROWTH = 0.06
"""The share of an instance's memory that is kept for what its requests will write, at most."""


def room_tokens(view: InstanceView) -> int:
    """The same of a view, with nothing kept for growth."""
    return Vacancy.of(view).room_tokens(view.report)


def _memory_load(view: InstanceView) -> float:
    report = view.report
    demand = report.capacity_tokens - report.free_tokens + report.waiting_tokens + unseen(view)[1]
    return demand / report.capacity_tokens if report.capacity_tokens else 0.0
