"""Instance views for tests of policies."""

from dataclasses import replace

from backend.registry.instance import InstanceState, StepCost, TierLoad
from gateway.policy.view import ClusterView, InstanceView, RequestView, ViewState
from migration.leg import RequestId
from tests.gateway.conftest import report

COST = StepCost(0.024, 3.5e-6, 0.15e-3, 0.05, 4000.0)
_STATES = {
    ViewState.READY: InstanceState.READY,
    ViewState.STALE: InstanceState.READY,
    ViewState.DRAINING: InstanceState.DRAINING,
    ViewState.STARTING: InstanceState.STARTING,
}


def instance(
    name: str,
    *,
    held: int = 0,
    running: int = 0,
    waiting: tuple[int, ...] = (),
    claims: int | None = None,
    claimed_tokens: int | None = None,
    tiers: tuple[tuple[str, TierLoad], ...] | None = None,
    state: ViewState = ViewState.READY,
    capacity: int = 1600,
    cost: StepCost | None = None,
    moves_in: int = 0,
    max_batch: int = 64,
) -> InstanceView:
    """`held` tokens by `running` normal requests; `waiting` are the demands in the queue. Claims are what runs and waits, unless said."""
    normal = (("normal", TierLoad(running, held)),) if running else ()
    shown = replace(
        report(name, state=_STATES[state], running=running),
        capacity_tokens=capacity,
        free_tokens=capacity - held,
        waiting=len(waiting),
        waiting_tokens=sum(waiting),
        head_tokens=waiting[0] if waiting else 0,
        head_tier="normal" if waiting else "",
        tiers=normal if tiers is None else tiers,
        migrations_in=moves_in,
        max_batch=max_batch,
        cost=cost or StepCost(),
    )
    count = running + len(waiting) if claims is None else claims
    tokens = held + sum(waiting) if claimed_tokens is None else claimed_tokens
    return InstanceView(shown, state, 0.0, count, tokens)


def cluster(*views: InstanceView) -> ClusterView:
    return ClusterView(tuple(sorted(views, key=lambda view: view.id)))


def request(name: str = "r", tokens: int = 100, tier: str = "normal", sequence: int | None = None) -> RequestView:
    return RequestView(RequestId(name), None, tier, tokens, sequence=sequence)
