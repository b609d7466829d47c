from pathlib import Path

import pytest

from backend.engine.shape import PrefillStyle
from gateway.policy.autoscale import DemandScaling, Fixed, FreenessRange
from gateway.policy.config import LlumnixPolicy, MidstreamPolicy
from simulator.scenario import ScenarioError, from_dict, parse

MINIMAL = '[workload]\ntrace = "S-S"\nrate = 5\n'
FULL = """
[workload]
trace = "S-S"
rate = 5
cv = 2
requests = 7
high_share = 0.5
seed = 9

[cluster]
instances = 2
capacity_blocks = 9
block_tokens = 8
watermark = 0
max_batch = 3
max_prefill_tokens = 4
prefill = "chunked"

[cost]
decode_base_s = 1
kv_bytes_per_token = 3
migration_bytes_per_s = 1e9
migration_downtime_s = 0.1
migration_slowdown = 0

[policy]
name = "llumnix"
out_tokens = 16

[policy.targets]
high = 1600

[autoscale]
name = "demand"
min_instances = 2
start_up_s = 20
interval_s = 1
"""
SCENARIOS = sorted((Path(__file__).parents[2] / "simulator" / "scenarios").glob("*.toml"))


def test_the_defaults_are_the_papers_cluster() -> None:
    scenario = parse(MINIMAL)
    assert (scenario.cluster.instances, scenario.cluster.capacity_blocks) == (16, 851)
    assert scenario.policy == MidstreamPolicy()
    assert scenario.autoscale.rule == Fixed()
    shape = scenario.shape()
    assert shape.style is PrefillStyle.FIRST
    assert shape.cost.step_s(1, 1000, 0, 0) == pytest.approx(0.024 + 0.0035 + 0.00015)


def test_every_section_is_read() -> None:
    scenario = parse(FULL)
    assert scenario.policy == LlumnixPolicy(out_tokens=16, targets={"high": 1600})
    assert scenario.autoscale.rule == DemandScaling(min_instances=2, start_up_s=20)
    assert (scenario.autoscale.interval_s, scenario.autoscale.start_up_s) == (1, 20)
    assert scenario.shape().style is PrefillStyle.CHUNKED
    assert scenario.shape().cost.decode_base_s == 1


def test_a_start_up_time_goes_with_any_rule() -> None:
    scenario = parse(MINIMAL + '[autoscale]\nname = "freeness"\nstart_up_s = 5\n')
    assert scenario.autoscale.rule == FreenessRange()
    assert scenario.autoscale.start_up_s == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MINIMAL + "[cluster]\ninstance = 2\n", "unknown key 'cluster.instance'"),
        (MINIMAL + "[clusters]\n", "unknown key 'clusters'"),
        (MINIMAL + "[cost]\nx = 2\n", "unknown key 'cost.x'"),
        (MINIMAL + '[policy]\nname = "llumnix"\ntheta = 2\n', "unknown key 'policy.theta'"),
        (MINIMAL + "[policy]\ntheta = 2\n", "unknown key 'policy.theta'"),
        (MINIMAL + '[autoscale]\nname = "freeness"\nout_share = 2\n', "unknown key 'autoscale.out_share'"),
        (MINIMAL + "rates = 2\n", "unknown key 'workload.rates'"),
        (MINIMAL + '[policy]\nname = "best"\n', "'policy.name'"),
        (MINIMAL + '[cluster]\nprefill = "last"\n', "'cluster.prefill'"),
        (MINIMAL + "[cluster]\ninstances = 0\n", "'cluster.instances'"),
        (MINIMAL + "cv = 0\n", "'workload.cv'"),
        ("", "'workload'"),
        ("[workload]\nrate = 5\n", "either 'trace' or 'file'"),
        ('[workload]\ntrace = "S-S"\n', "'workload.rate' is missing"),
        ('[workload]\ntrace = "X"\nrate = 1\n', "'workload.trace'"),
        ("[workload\n", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        parse(text)


def test_several_faults_are_all_named() -> None:
    with pytest.raises(ScenarioError, match=r"cluster\.x.*cost\.y"):
        from_dict({"workload": {"trace": "S-S", "rate": 1}, "cluster": {"x": 1}, "cost": {"y": 1}})


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_that_come_with_it_can_be_read(path: Path) -> None:
    assert parse(path.read_text()).workload.requests > 0


def test_there_is_a_scenario_for_each_trace() -> None:
    assert {parse(path.read_text()).workload.trace for path in SCENARIOS} >= {"ShareGPT", "BurstGPT", "S-S", "M-M", "L-L", "S-L", "L-S"}
