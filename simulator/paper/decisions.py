"""How long decisions take, and that this does not grow with the number of running requests. Pure but for `clock`.

Everything a gateway decides from is sums, so a cluster of busy instances costs no more than one of idle ones. What a source does by itself
(choosing the request that moves) grows with its own requests, and runs beside its engine's steps, not in them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from backend.engine.model import EngineModel
from backend.engine.request import EngineRequest
from backend.engine.shape import EngineShape
from backend.registry.instance import LoadReport
from backend.registry.store import Sighting
from gateway.policy.config import MidstreamPolicy
from gateway.policy.line import LineView, Waiting
from gateway.policy.load import standing
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, RequestView, assemble
from migration.choice import Movable, PriceRule, best_moves
from migration.leg import InstanceId, RequestId
from simulator.scenario import Scenario

_REPEATS = 30


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds, medians. `bind`: one request is given a place; `pair`, `offer`: one round of rebalancing for the whole cluster;
    `choose`: one source's own choice among its requests."""

    running: int
    bind_us: float
    pair_us: float
    offer_us: float
    choose_us: float


def decision_costs(scenario: Scenario, running: tuple[int, ...], clock: Callable[[], float]) -> list[DecisionCost]:
    """For clusters of the scenario's size in which each instance runs about so many requests."""
    return [_cost(scenario, count, clock) for count in running]


def _cost(scenario: Scenario, running: int, clock: Callable[[], float]) -> DecisionCost:
    policy = MidstreamPolicy().build(Tiers())
    cluster = _cluster(scenario, running)
    rng = Random(1)
    line = LineView((Waiting(RequestView(RequestId("r"), None, "normal", 64), 64, 0.0),), 0.0)
    pairing, price = policy.rebalancing.pairing, policy.rebalancing.price
    assert pairing is not None
    assert price is not None
    sums = [standing(view, policy.tiers) for view in cluster.instances]
    movable = [Movable(RequestId(f"r{n}"), 1, 1.0, 96) for n in range(running)]
    cost = scenario.cost
    rule = PriceRule(cost.decode_per_token_s, cost.decode_per_request_s, price.threshold_s, 160)

    return DecisionCost(
        running=running,
        bind_us=_timed(lambda: policy.line.bind(line, cluster, rng), clock),
        pair_us=_timed(lambda: pairing.pairs(cluster), clock),
        offer_us=_timed(lambda: price.offers(cluster, frozenset(), frozenset()), clock),
        choose_us=_timed(lambda: best_moves(movable, sums[0], sums[1:], rule), clock),
    )


def _cluster(scenario: Scenario, running: int) -> ClusterView:
    """Instances with a few requests more or less each, so that there is something to balance."""
    shape = scenario.shape()
    sightings = []
    for number in range(scenario.cluster.instances):
        count = max(0, running + number % 5 - 2)
        report = replace(_busy(shape, count), instance=InstanceId(f"i{number:03}"))
        sightings.append(Sighting(report, 0.0, count, count * 64))
    return assemble(sightings, 1e9, 0.0, {})


def _busy(shape: EngineShape, running: int) -> LoadReport:
    model = EngineModel(shape)
    for _ in range(running):
        model.add(EngineRequest(64, 64), 0.0)
    while model.waiting and model.begin_step(0.0) is not None:
        model.end_step()
    return model.report(0.0)


def _timed(action: Callable[[], object], clock: Callable[[], float]) -> float:
    """Microseconds, the median of some calls."""
    times = []
    for _ in range(_REPEATS):
        began_s = clock()
        action()
        times.append(clock() - began_s)
    return 1e6 * median(times)
