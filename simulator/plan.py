"""How many instances a workload needs to meet its objectives, for each policy. Pure but for `clock`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.policy.config import PolicyConfig
from simulator.bars import Bar, bars
from simulator.outcome import Outcome, Spread
from simulator.run import simulate
from simulator.scenario import Scenario
from simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the 99th percentile may be, in seconds."""

    ttft_p99_s: float
    tpot_p99_s: float

    def met_by(self, outcome: Outcome) -> bool:
        """True if both hold."""
        ttft, tpot = _p99s(outcome)
        return ttft <= self.ttft_p99_s and tpot <= self.tpot_p99_s


@dataclass(frozen=True, slots=True)
class Need:
    """What one policy needs, and what it then reaches. `instances` is None if the most allowed are too few; then the figures are theirs."""

    policy: str
    instances: int | None
    ttft_p99_s: float
    tpot_p99_s: float
    e2e_mean_s: float


def needs(
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    objectives: Objectives,
    policies: Sequence[PolicyConfig],
    max_instances: int,
    clock: Callable[[], float],
) -> list[Need]:
    """One row per policy, by bisection: more instances are taken never to be worse. Raises ScenarioError."""
    return [_need(replace(scenario, policy=policy), arrivals, objectives, max_instances, clock) for policy in policies]


def _need(scenario: Scenario, arrivals: Sequence[Arrival], objectives: Objectives, max_instances: int, clock: Callable[[], float]) -> Need:
    def at(instances: int) -> Outcome:
        return simulate(replace(scenario, cluster=replace(scenario.cluster, instances=instances)), arrivals, clock)

    reached = at(max_instances)
    if not objectives.met_by(reached):
        return _row(scenario, None, reached)
    too_few, enough = 0, max_instances
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        outcome = at(middle)
        if objectives.met_by(outcome):
            enough, reached = middle, outcome
        else:
            too_few = middle
    return _row(scenario, enough, reached)


def _row(scenario: Scenario, instances: int | None, outcome: Outcome) -> Need:
    return Need(scenario.policy.name, instances, *_p99s(outcome), Spread.of(each.e2e_s for each in outcome.requests).mean)


def _p99s(outcome: Outcome) -> tuple[float, float]:
    ttft = Spread.of(each.ttft_s for each in outcome.requests)
    tpot = Spread.of(each.tpot_s for each in outcome.requests if each.tpot_s is not None)
    return ttft.p99, tpot.p99


def picture(rows: Sequence[Need], max_instances: int) -> str:
    """Instances as bars, as SVG; a policy that needs more than allowed has no bar of ours."""
    return bars("Instances needed", [_bar(row, max_instances) for row in rows])


def _bar(row: Need, max_instances: int) -> Bar:
    if row.instances is None:
        return Bar(row.policy, max_instances, f"more than {max_instances}")
    return Bar(row.policy, row.instances, str(row.instances), ours=True)
