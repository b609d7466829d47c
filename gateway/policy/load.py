"""PURE. How loaded an instance is: virtual usage and freeness, in tokens per running request, that is in decode steps to come.

    freeness = (capacity - sum of virtual usages) / max(1, running requests)

A running request uses what it holds; a tier with a target load reserves, in total and once one of it runs, the rest of the memory as its
head-room. The three variants differ in what waiting requests use: all of them and every claim that no report has seen yet (dispatch),
or the head of the queue alone (rebalance, scale). A draining instance holds an imaginary request of infinite usage: -inf.
"""

from collections.abc import Iterable, Mapping
from math import inf

from backend.registry.instance import LoadReport
from gateway.policy.tier import Tiers
from gateway.policy.view import InstanceView, ViewState
from migration.choice import Standing

Targets = Mapping[str, int]
"""By tier, the load in tokens that its requests are to find at most: the paper's head-room is the capacity less that."""


def unseen(view: InstanceView) -> tuple[int, int]:
    """Claims that the report does not know of yet, and their tokens (at the mean of all claims)."""
    requests = max(0, view.claims - view.report.running - view.report.waiting)
    if not requests or not view.claims:
        return 0, 0
    return requests, -(-view.claimed_tokens * requests // view.claims)


def head_room_tokens(report: LoadReport, targets: Targets) -> int:
    """What tiers with a target reserve beyond what their requests hold."""
    if not targets:
        return 0
    present = (name for name, load in report.tiers if load.running and name in targets)
    return sum(max(0, report.capacity_tokens - targets[name]) for name in present)


def dispatch_freeness(view: InstanceView, targets: Targets) -> float:
    """As a newcomer finds it: everything that waits, and every claim under way, comes before it."""
    if view.state is ViewState.DRAINING:
        return -inf
    report = view.report
    free = report.free_tokens - head_room_tokens(report, targets) - report.waiting_tokens - unseen(view)[1]
    return free / max(1, report.running)


def rebalance_freeness(view: InstanceView, targets: Targets) -> float:
    """With room for the head of its queue, so that a blocked long prompt makes its instance a source until it starts."""
    if view.state is ViewState.DRAINING:
        return -inf
    report = view.report
    return (report.free_tokens - head_room_tokens(report, targets) - report.head_tokens) / max(1, report.running)


def scale_freeness(views: Iterable[InstanceView]) -> float:
    """The mean of what normal requests find on instances that are up and stay, as far as it is known; +inf if there are none."""
    up = (view for view in views if view.state in (ViewState.READY, ViewState.STALE))
    values = [rebalance_freeness(view, {}) for view in up if view.report.is_measured]
    return sum(values) / len(values) if values else inf


def standing(view: InstanceView, tiers: Tiers) -> Standing:
    """The sums that prices are made of. Waiting requests, claims under way and arriving migrations count; their tier is not reported
    but for the queue's head, so they weigh as the default tier does."""
    report = view.report
    requests, tokens, weight, usual = report.running, 0, 0.0, tiers.find(tiers.default).weight
    for name, load in report.tiers:
        tokens += load.tokens
        weight += tiers.find(name).weight * load.running
    coming, coming_tokens = unseen(view)
    if report.waiting:
        weight += tiers.find(report.head_tier).weight + usual * (report.waiting - 1)
    if report.migrations_in:
        held = report.capacity_tokens - report.free_tokens
        coming += report.migrations_in
        coming_tokens += max(0, held - tokens - report.block_tokens // 2 * report.running)
    return Standing(
        instance=view.id,
        free_tokens=report.free_tokens,
        head_tokens=report.head_tokens,
        running=report.running,
        requests=requests + report.waiting + coming,
        tokens=tokens + report.waiting_tokens + coming_tokens,
        weight=weight + usual * coming,
    )
