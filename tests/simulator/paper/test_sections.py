"""What the sections say of made-up results whose answer is known."""

import pytest

from simulator.paper.experiment import EXPERIMENTS, RATES, PaperRun, Plan
from simulator.paper.finding import Finding
from simulator.paper.floor import floor_instances
from simulator.paper.latency import fragmentation_section, latency_section
from simulator.paper.result import RunResult, TierFigures
from simulator.paper.scale import stress_section
from simulator.paper.scaling import scaling_section, thresholds_section
from simulator.paper.scatter import error_percent, scatter_section
from simulator.paper.table import Cell, Table
from simulator.paper.urgency import BASE, priorities_section, weights_section
from simulator.scenario import from_dict
from simulator.workload import Arrival

PLAN = Plan(seeds=(1, 2), requests=50)
WORTH = {"round_robin": 4.0, "infaas": 2.0, "llumnix": 1.0, "midstream": 0.5, BASE: 1.0, "llumnix, head-room": 1.0}


def result(value: float, instances: float = 16.0, **tiers: float) -> RunResult:
    worths = {"all": value, "high": value, "normal": value} | tiers
    figures = tuple(TierFigures(tier, 9, v, v, v, v, v, v, v, v, v) for tier, v in worths.items())
    return RunResult(figures, tuple(value * share for share in (0.0, 0.1, 0.2, 0.1)), 0, 5, instances, 1000.0, 0.1)


def findings(experiment: str) -> list[Finding]:
    return [Finding(run, result(WORTH[run.series])) for run in EXPERIMENTS[experiment](PLAN)]


def cells(table: Table, **first: str) -> tuple[Cell, ...]:
    (row,) = (row for row in table.rows if row[0] == first["row"])
    return row


def test_every_trace_has_its_ratio_and_the_mean() -> None:
    section = latency_section(findings("traces"))
    tables = {table.name: table for table in section.tables}
    assert len(tables["traces-midstream"].rows) == len(RATES) + 2
    assert cells(tables["traces-midstream"], row="**geometric mean**")[1:] == pytest.approx([0.5] * 8)
    assert cells(tables["traces-round_robin"], row="S-S 39")[1:] == pytest.approx([4.0] * 8)
    assert len(tables["traces-llumnix"].rows) == 3 * len(RATES)
    levels = tables["traces-by-rate"].rows
    assert [row[:2] for row in levels[:4]] == [("midstream", "low"), ("midstream", "middle"), ("midstream", "high"), ("infaas", "low")]
    assert levels[3][2:] == pytest.approx([2.0] * 8)
    assert section.picture.count("<polyline") == 7 * 7 * 4


def test_claims_compare_the_best_of_all_rates() -> None:
    found = findings("traces")
    lucky = [
        Finding(each.run, result(10.0)) if (each.run.series, each.run.panel, each.run.x) == ("infaas", "ShareGPT", 7.75) else each
        for each in found
    ]
    (claims,) = (table for table in latency_section(lucky).tables if table.name == "traces-claims")
    assert cells(claims, row="prefill mean, real traces, against infaas")[1:] == pytest.approx((2.2, 1.8, 10.0, 20.0))
    assert cells(claims, row="prefill mean, generated traces, against infaas")[3:] == pytest.approx((2.0, 4.0))
    assert cells(claims, row="preemption loss saved, against round_robin")[3:] == pytest.approx((0.75, 0.875))


def test_a_rate_that_was_not_run_has_no_row() -> None:
    middle = [each for each in findings("traces") if each.run.x == RATES[each.run.panel][1]]
    (levels,) = (table for table in latency_section(middle).tables if table.name == "traces-by-rate")
    assert [row[:2] for row in levels.rows] == [(name, "middle") for name in ("midstream", "infaas", "round_robin")]


def test_more_seeds_say_how_sure_a_ratio_is() -> None:
    section = scatter_section(findings("scatter"))
    ratios, errors = section.tables
    assert "10 seeds, 1 to 10" in ratios.title
    assert [row[0] for row in ratios.rows[:1]] == ["ShareGPT 7.75"]
    assert len(ratios.rows) == len(RATES) + 2
    assert cells(ratios, row="**geometric mean**")[1:] == pytest.approx([0.5] * 8)
    assert cells(errors, row="**geometric mean**")[1:] == pytest.approx([0.0] * 8)


def test_the_error_is_that_of_a_mean_of_logarithms() -> None:
    """The jackknife of a mean is its standard error: here of the logarithms of 1 and 4, log(2) each from their mean, over two seeds."""
    found = [each for each in findings("traces") if (each.run.panel, each.run.x) == ("S-S", 39.0)]
    runs = [Finding(each.run, result({1: 1.0, 2: 4.0}[each.run.seed])) for each in found if each.run.series == "midstream"]
    base = [each for each in found if each.run.series == "llumnix"]
    assert error_percent([(runs, base)], "ttft_mean") == pytest.approx(100.0)
    assert error_percent([(runs[:1], base[:1])], "ttft_mean") is None


def test_fragmentation_is_a_share_of_all_memory_in_percent() -> None:
    (table,) = fragmentation_section(findings("fragmentation")).tables
    assert cells(table, row="llumnix")[1:] == pytest.approx((10.0, 10.0))
    assert cells(table, row="infaas")[1] == pytest.approx(20.0)


def test_urgent_requests_gain_and_the_others_pay() -> None:
    found = [
        Finding(each.run, result(1.0, high=0.5, normal=1.1)) if each.run.series == "midstream" else each for each in findings("priorities")
    ]
    (table,) = priorities_section(found).tables
    rows = [row for row in table.rows if row[:2] == ("S-S, all", "midstream")]
    assert rows[0][2:] == pytest.approx((2.0, 2.0, 2.0, 2.0, 10.0, 10.0, 10.0))


def test_the_weight_is_a_row_of_its_own() -> None:
    (table,) = weights_section(findings("weights")).tables
    assert [row[0] for row in table.rows] == [1.0, 2.0, 5.0, 10.0, 20.0, 40.0]
    assert table.rows[0][1] == pytest.approx(2.0)


def test_instances_are_compared_with_infaas() -> None:
    found = [Finding(each.run, result(1.0, 9.0 if each.run.series == "midstream" else 12.0)) for each in findings("scaling")]
    (table,) = scaling_section(found).tables
    assert {row[7] for row in table.rows if row[1] == "midstream"} == {25.0}
    assert all(isinstance(row[8], float) and row[8] > 0 for row in table.rows)


def test_equal_latency_is_found_between_thresholds() -> None:
    def made(run: PaperRun) -> RunResult:
        used = {"infaas": 12.0, "llumnix": 11.0, "midstream": 10.0}[run.series]
        rank = [each.x for each in runs if each.series == run.series and each.seed == run.seed].index(run.x)
        return result(25.0 / 5.0**rank, used + rank)

    runs = list(EXPERIMENTS["thresholds"](PLAN))
    _, equal = thresholds_section([Finding(run, made(run)) for run in runs]).tables
    assert equal.rows[0][:2] == ("TTFT P99 5 s", "infaas")
    assert equal.rows[0][2:] == pytest.approx((13.0, 0.0))
    assert equal.rows[2][2:] == pytest.approx((11.0, 100 * 2 / 13))


def test_stress_shows_both_policies() -> None:
    table, decisions = stress_section(findings("stress"), ()).tables
    assert [row[1] for row in table.rows[:2]] == ["llumnix", "midstream"]
    assert not decisions.rows


def test_the_floor_is_what_full_memory_would_take() -> None:
    scenario = from_dict(
        {
            "workload": {"file": "x"},
            "cluster": {"capacity_blocks": 100, "block_tokens": 10},
            "cost": {
                "decode_base_s": 1.0,
                "decode_per_token_s": 0.0,
                "decode_per_request_s": 0.01,
                "prefill_per_token_s": 0.1,
                "prefill_per_token2_s": 0.0,
            },
        }
    )
    # Ten prompt tokens; steps at contexts 11 and 12: 23 tokens of 1000 for a second, twice 0.01, and 10 times 0.1 for the prompt.
    assert floor_instances(scenario, [Arrival(2.0, 10, 3)], 4.0) == pytest.approx((0.023 + 0.02 + 1.0) / 4)


def test_the_plan_says_how_much_is_run() -> None:
    full, quick = (sum(len(list(make(plan))) for make in EXPERIMENTS.values()) for plan in (Plan(), Plan((1,), 1000, True)))
    assert full > 10 * quick
    assert {run.scenario.workload.seed for run in EXPERIMENTS["traces"](Plan((7,), 5))} == {7}
