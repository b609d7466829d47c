import pytest

from simulator.paper.experiment import PaperRun
from simulator.paper.finding import Finding, average, crossing, geometric_mean, of, ratio
from simulator.paper.result import RunResult, TierFigures
from simulator.scenario import from_dict

SCENARIO = from_dict({"workload": {"trace": "S-S", "rate": 5}})


def finding(series: str, seed: int, value: float, *, loss: float = 0.1, x: float = 1.0, panel: str = "S-S") -> Finding:
    figures = tuple(
        TierFigures(tier, 10, value, value, value, value, value, value, value, loss, value) for tier in ("all", "high", "normal")
    )
    return Finding(PaperRun("traces", panel, x, series, seed, SCENARIO), RunResult(figures, (0.1,) * 40, 0, 0, 16.0, 60.0, 0.1))


BASE = [finding("llumnix", seed, value) for seed, value in ((1, 1.0), (2, 2.0))]


def test_ratios_are_taken_seed_by_seed() -> None:
    runs = [finding("midstream", 1, 2.0), finding("midstream", 2, 1.0), finding("midstream", 3, 100.0)]
    assert ratio(runs, BASE, "e2e_mean") == pytest.approx(1.0)
    assert ratio(runs[:1], BASE, "ttft_p99", "high") == pytest.approx(2.0)
    assert ratio(runs[2:], BASE, "e2e_mean") is None


def test_losses_are_added_up_and_tiny_ones_are_no_base() -> None:
    none = [finding("a", 1, 1.0, loss=0.0), finding("a", 2, 1.0, loss=0.4)]
    some = [finding("b", 1, 1.0, loss=0.2), finding("b", 2, 1.0, loss=0.2)]
    tiny = [finding("c", 1, 1.0, loss=0.001), finding("c", 2, 1.0, loss=0.001)]
    assert ratio(none, some, "preemption_loss") == pytest.approx(1.0)
    assert ratio(some, tiny, "preemption_loss") is None


def test_geometric_means_leave_out_what_is_not_known() -> None:
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.0, 1.0]) == pytest.approx(0.1), "nothing at all counts as a hundredth"
    assert geometric_mean([None]) is None


def test_findings_are_picked_by_their_place() -> None:
    found = [finding("a", 1, 1.0), finding("b", 1, 3.0, x=2.0), finding("b", 2, 5.0, x=2.0, panel="M-M")]
    assert of(found, series="b") == found[1:]
    assert of(found, series="b", panel="M-M") == found[2:]
    assert of(found, x=1.0) == found[:1]
    assert average(found[1:], "e2e_mean") == 4.0


@pytest.mark.parametrize(
    ("points", "cost"),
    [
        ([(10.0, 10.0), (12.0, 2.5)], 11.0),
        ([(12.0, 2.5), (10.0, 10.0), (14.0, 1.0)], 11.0),
        ([(10.0, 4.0), (12.0, 2.5)], None),
        ([(10.0, 40.0)], None),
        ([], None),
    ],
)
def test_the_cost_of_a_latency_lies_between_two_runs(points: list[tuple[float, float]], cost: float | None) -> None:
    assert crossing(points, 5.0) == (None if cost is None else pytest.approx(cost))
