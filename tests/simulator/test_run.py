"""Whole simulations, small ones: what holds for every request under every policy, and what each policy is there for."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import Cluster
from simulator.outcome import Outcome, RequestOutcome, mean
from simulator.run import arrivals_of, simulate
from simulator.scenario import Scenario, ScenarioError, from_dict
from simulator.workload import Arrival

POLICIES = ["round_robin", "least_outstanding", "infaas", "llumnix", "midstream"]
SMALL = {"instances": 3, "capacity_blocks": 120}


def scenario(
    policy: str = "midstream", parameters: dict[str, Any] | None = None, *, cluster: dict[str, Any] | None = None, **sections: Any
) -> Scenario:
    raw = {"workload": {"trace": "S-S", "rate": 1}, "cluster": SMALL | (cluster or {}), "policy": {"name": policy, **(parameters or {})}}
    return from_dict(raw | sections)


def run(where: Scenario, arrivals: list[Arrival]) -> Outcome:
    return simulate(where, arrivals, lambda: 0.0)


def load(seed: int = 1, requests: int = 150) -> list[Arrival]:
    """Rather more than three small instances can hold at once, with prompts of all lengths."""
    return [
        Arrival(n * 0.05, 1 + (n * 7919 * seed) % 700, 1 + (n * 104729 * seed) % 300, "high" if n % 10 == 0 else "normal")
        for n in range(requests)
    ]


@pytest.mark.parametrize("prefill", ["first", "chunked"])
@pytest.mark.parametrize("policy", POLICIES)
def test_everything_ends_and_nothing_is_left(policy: str, prefill: str) -> None:
    cluster = Cluster(scenario(policy, cluster={"prefill": prefill, "max_prefill_tokens": 512}), load())
    cluster.run()
    assert all(job.finish_s is not None and job.first_token_s is not None for job in cluster.jobs)
    assert all(job.engine_request.output_tokens == job.arrival.output_tokens for job in cluster.jobs)
    cluster.loop.run(lambda: cluster.loop.now_s > 10_000)  # copies under way when the last request ended come to an end
    for instance in cluster.instances.values():
        assert instance.model.pool.free_blocks == 120
        assert (instance.claims, instance.claimed_tokens, instance.moves_in, instance.moves_out) == (0, 0, 0, 0)
        assert not instance.jobs
    assert not cluster.line


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_is_an_outcome(policy: str) -> None:
    assert run(scenario(policy), load()) == run(scenario(policy), load())


def test_times_of_a_lonely_request_are_the_cost_models() -> None:
    where = scenario("round_robin")
    (alone,) = run(where, [Arrival(1.0, 100, 11)]).requests
    cost = where.shape().cost
    assert alone.ttft_s == pytest.approx(cost.step_s(0, 0, 100, 10_000))
    assert alone.tpot_s == pytest.approx(mean([cost.step_s(1, 100 + n, 0, 0) for n in range(1, 11)]))
    assert alone.e2e_s == pytest.approx(alone.ttft_s + 10 * (alone.tpot_s or 0))


def test_migration_slows_both_sides_and_stops_the_request_for_the_downtime() -> None:
    """One full instance, one empty: requests move there, and the longest gap of those that moved is the downtime."""
    arrivals = [Arrival(0.0, 150, 400) for _ in range(12)] + [Arrival(1.0, 900, 10)]
    costs = {"migration_downtime_s": 0.5, "migration_slowdown": 0.0}
    moving = run(scenario("llumnix", cost=costs), arrivals)
    assert moving.migrations > 0
    moved = [each for each in moving.requests if each.migrations]
    swift = run(scenario("llumnix", cost=costs | {"migration_downtime_s": 0.0}), arrivals)
    assert mean([each.e2e_s for each in moved]) > mean([each.e2e_s for each in swift.requests if each.migrations]) + 0.3


def test_moving_makes_room_for_a_long_prompt() -> None:
    """Memory is free, but split over the instances: only moving can start the long one before others end."""
    arrivals = [Arrival(n * 0.01, 200, 1200) for n in range(6)] + [Arrival(2.0, 2100, 5)]
    stuck = run(scenario("llumnix", parameters={"migrate": False}, cluster={"instances": 2, "capacity_blocks": 160}), arrivals)
    freed = run(scenario("llumnix", cluster={"instances": 2, "capacity_blocks": 160}), arrivals)
    late = run(scenario("midstream", cluster={"instances": 2, "capacity_blocks": 160}), arrivals)
    assert freed.requests[-1].ttft_s < stuck.requests[-1].ttft_s
    assert late.requests[-1].ttft_s < stuck.requests[-1].ttft_s
    assert mean(freed.fragmentation) <= mean(stuck.fragmentation)


def test_late_binding_lets_short_ones_pass_a_head_that_fits_nowhere() -> None:
    arrivals = [Arrival(0.0, 1000, 400) for _ in range(3)] + [Arrival(0.1, 1800, 5)] * 3 + [Arrival(0.2, 50, 5)] * 5
    passed = run(scenario(parameters={"ahead": 0, "age_step_s": 0}), arrivals)
    blocked = run(scenario(parameters={"ahead": 0, "backfill": False}), arrivals)
    assert mean([each.ttft_s for each in passed.requests[6:]]) < 1.0
    assert mean([each.ttft_s for each in blocked.requests[6:]]) > 5.0


def by_tier(outcome: Outcome, tier: str) -> list[RequestOutcome]:
    return [each for each in outcome.requests if each.tier == tier]


def test_urgent_requests_wait_less_and_not_at_all_for_those_who_came_before() -> None:
    arrivals = load(requests=200)
    for policy in ("infaas", "midstream"):
        outcome = run(scenario(policy), arrivals)
        flat = run(scenario(policy, parameters={"priorities": False}), arrivals)
        assert mean([each.ttft_s for each in by_tier(outcome, "high")]) < mean([each.ttft_s for each in by_tier(flat, "high")])


@pytest.mark.parametrize("kept", [{"release": False}, {"release_tokens": 2000}])
def test_what_was_preempted_and_is_long_waits_in_line_and_others_start_where_it_ran(kept: dict[str, Any]) -> None:
    """Two grow side by side until one is preempted. Kept at its instance, it holds what it left free until the other one is over."""
    arrivals = [Arrival(0.0, 600, 1200), Arrival(0.1, 600, 1200), Arrival(15.0, 200, 10)]
    where = {"instances": 1, "capacity_blocks": 120, "watermark": 0.0}
    base = {"growth": 0.0}
    stay, go = (run(scenario(cluster=where, parameters={**base, **each}), arrivals) for each in (kept, {}))
    assert stay.requests[1].preemptions == go.requests[1].preemptions == 1
    assert stay.requests[2].ttft_s > 5.0
    assert go.requests[2].ttft_s < 1.0


@pytest.mark.parametrize("rule", [{"name": "demand", "max_instances": 6}, {"name": "freeness", "max_instances": 6, "hold_s": 2.0}])
def test_instances_come_and_go_and_lose_nobody(rule: dict[str, Any]) -> None:
    burst = [Arrival(n * 0.02, 300, 200) for n in range(80)]
    quiet = [Arrival(60.0 + n * 5, 50, 50) for n in range(20)]
    cluster = Cluster(scenario(cluster={"instances": 1}, autoscale={**rule, "start_up_s": 1.0}), burst + quiet)
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, len(cluster.instances))
        cluster.loop.after(1.0, watch)

    cluster.loop.after(1.0, watch)
    cluster.run()
    assert 1 < most <= 6
    assert len(cluster.instances) < most
    assert 1.0 < cluster.instances_mean < most
    assert all(job.finish_s is not None for job in cluster.jobs)


@pytest.mark.parametrize(
    ("arrivals", "complaint"),
    [([Arrival(0.0, 1900, 100)], "request 0 needs"), ([Arrival(0.0, 1, 1, "gold")], "unknown tier 'gold'"), ([], "nothing to simulate")],
)
def test_what_cannot_be_simulated_is_said_at_once(arrivals: list[Arrival], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        run(scenario(), arrivals)


def test_the_arrivals_of_a_trace() -> None:
    where = from_dict({"workload": {"trace": "S-S", "rate": 4, "requests": 10}})
    assert len(arrivals_of(where)) == 10
    with pytest.raises(ScenarioError):
        arrivals_of(from_dict({"workload": {"file": "x.csv"}}))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 80)), min_size=1, max_size=40),
    st.sampled_from(POLICIES),
    st.sampled_from(["first", "chunked"]),
    st.booleans(),
)
def test_any_workload_ends(arrivals: list[tuple[float, int, int]], policy: str, prefill: str, release: bool) -> None:
    """No request is lost or served twice, whatever comes."""
    parameters = {"release": release, "release_tokens": 0} if policy == "midstream" else {}
    where = scenario(policy, parameters, cluster={"capacity_blocks": 64, "prefill": prefill, "max_prefill_tokens": 300})
    cluster = Cluster(where, [Arrival(*each) for each in sorted(arrivals)])
    cluster.run()
    assert sum(job.finish_s is not None for job in cluster.jobs) == len(arrivals)
    assert all(job.engine_request.tokens == job.arrival.prompt_tokens + job.arrival.output_tokens for job in cluster.jobs)
    assert all(job.lost_since_s is None for job in cluster.jobs)
