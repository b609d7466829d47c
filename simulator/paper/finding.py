"""PURE. What several runs say together: one policy's figures as multiples of another's, seed by seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from simulator.outcome import mean
from simulator.paper.experiment import PaperRun
from simulator.paper.result import ALL, RunResult, TierFigures

LEAST_LOSS_S = 0.01
"""A preemption loss below this, a request in the mean, is no base to divide by: a handful of preemptions."""

LEAST_RATIO = 0.01
"""What a smaller ratio counts as in a geometric mean: none at all is not infinitely better."""

METRICS = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "preemption_loss", "longest_ttft")
LABELS = ("end-to-end", "P99", "TTFT", "P99", "TPOT", "P99", "preemption loss", "TTFT, longest 1 %")


@dataclass(frozen=True, slots=True)
class Finding:
    """One run and what came of it."""

    run: PaperRun
    result: RunResult


def of(
    findings: Iterable[Finding],
    *,
    experiment: str | None = None,
    panel: str | None = None,
    series: str | None = None,
    x: float | None = None,
) -> list[Finding]:
    """Those that are of this experiment, panel, series and place (None: of any)."""
    return [
        each
        for each in findings
        if experiment in (None, each.run.experiment)
        and panel in (None, each.run.panel)
        and series in (None, each.run.series)
        and x in (None, each.run.x)
    ]


def value(figures: TierFigures, metric: str) -> float:
    """One of METRICS."""
    return float(getattr(figures, metric))


def average(findings: Sequence[Finding], metric: str, tier: str = ALL) -> float:
    """The arithmetic mean over seeds."""
    return mean([value(each.result.tier(tier), metric) for each in findings])


def ratio(findings: Sequence[Finding], base: Sequence[Finding], metric: str, tier: str = ALL) -> float | None:
    """`findings` over `base`: the geometric mean over seeds that both have. For the preemption loss, the ratio of the sums, as a seed
    may have none. None if there is nothing to divide, or a loss below LEAST_LOSS_S to divide by."""
    bases = {each.run.seed: value(each.result.tier(tier), metric) for each in base}
    pairs = [(value(each.result.tier(tier), metric), bases[each.run.seed]) for each in findings if each.run.seed in bases]
    if not pairs:
        return None
    if metric == "preemption_loss":
        below = sum(other for _, other in pairs)
        return sum(own for own, _ in pairs) / below if below >= LEAST_LOSS_S * len(pairs) else None
    return geometric_mean([own / other for own, other in pairs if other > 0])


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known, none taken to be less than LEAST_RATIO; None if none is known."""
    known = [max(LEAST_RATIO, each) for each in values if each is not None]
    return exp(sum(log(each) for each in known) / len(known)) if known else None


def crossing(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Of points (cost, latency): the least cost at which the latency is `wanted`, between two neighbours, along a straight line in the
    latency's logarithm. None if it is nowhere between two of them."""
    ranked = sorted(points)
    for (cost, latency), (next_cost, next_latency) in pairwise(ranked):
        if latency > wanted >= next_latency > 0:
            share = (log(latency) - log(wanted)) / (log(latency) - log(next_latency))
            return cost + share * (next_cost - cost)
    return None
