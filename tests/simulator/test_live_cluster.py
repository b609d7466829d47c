"""A gateway's list of instances becomes a scenario's cluster."""

import json
from typing import Any

import pytest

from simulator.live_cluster import as_measured
from simulator.scenario import ScenarioError, from_dict

SCENARIO = from_dict(
    {
        "workload": {"trace": "S-S", "rate": 4},
        "cluster": {"instances": 16, "prefill": "chunked", "max_prefill_tokens": 2048},
        "cost": {"migration_downtime_s": 0.1},
    }
)
COST = {
    "base_s": 0.06,
    "per_token_s": 2e-6,
    "per_request_s": 0.01,
    "last_step_s": 0.07,
    "prefill_tokens_per_s": 500.0,
    "prefill_base_s": 0.04,
    "prefill_per_token2_s": 1e-8,
}


def listed(name: str, *, cost: dict[str, float] | None = None, **fields: Any) -> dict[str, Any]:
    known = {"id": name, "state": "ready", "kind": "llumlet", "capacity_tokens": 3200, "block_tokens": 32, "max_batch": 64}
    return {**known, "cost": {**COST, **(cost or {})}, **fields}


def measured(*instances: dict[str, Any], time_scale: float = 1.0) -> Any:
    return as_measured(SCENARIO, json.dumps({"instances": instances}).encode(), time_scale)


def test_the_cluster_is_the_one_that_is_there() -> None:
    found = measured(
        listed("a"),
        listed("b", capacity_tokens=6400, max_batch=32, cost={"base_s": 0.02, "prefill_tokens_per_s": 250.0}),
        listed("c", state="draining", capacity_tokens=64, cost={"base_s": 9.0}),
    )
    cluster, cost = found.cluster, found.cost
    assert (cluster.instances, cluster.capacity_blocks, cluster.block_tokens, cluster.max_batch) == (2, 150, 32, 32)
    assert (cost.decode_base_s, cost.decode_per_token_s, cost.decode_per_request_s) == pytest.approx((0.04, 2e-6, 0.01))
    assert (cost.prefill_base_s, cost.prefill_per_token_s, cost.prefill_per_token2_s) == pytest.approx((0.04, 0.003, 1e-8))


def test_what_no_engine_says_stays_as_the_scenario_has_it() -> None:
    found = measured(listed("a"))
    assert (found.cluster.prefill, found.cluster.max_prefill_tokens) == ("chunked", 2048)
    assert found.cost.migration_downtime_s == 0.1
    assert found.workload == SCENARIO.workload


def test_live_seconds_become_the_scenarios() -> None:
    found = measured(listed("a"), time_scale=2.0)
    assert (found.cost.decode_base_s, found.cost.prefill_per_token_s) == pytest.approx((0.03, 0.001))


@pytest.mark.parametrize(
    ("instances", "complaint"),
    [
        ([], "no instance is ready"),
        ([listed("a", state="stale")], "no instance is ready"),
        ([listed("a"), listed("b", cost={"base_s": 0.0})], "measured no steps yet: b"),
        ([listed("a", cost={"prefill_tokens_per_s": 0.0})], "measured no steps yet: a"),
        ([listed("a"), listed("b", block_tokens=16)], "not of one size"),
        ([{"id": "a"}], "no list of instances"),
    ],
)
def test_what_cannot_be_simulated_is_said(instances: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        measured(*instances)


def test_an_answer_that_is_no_list_is_said() -> None:
    with pytest.raises(ScenarioError, match="no list of instances"):
        as_measured(SCENARIO, b"<html>", 1.0)
