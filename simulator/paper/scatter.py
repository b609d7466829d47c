"""PURE. How sure the ratios of figure 11 are: `midstream` over `llumnix` at the middle rates over more seeds, and their standard errors."""

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import TypeAlias

from simulator.outcome import mean
from simulator.paper.experiment import RATES
from simulator.paper.finding import LABELS, METRICS, Finding, geometric_mean, of, ratio
from simulator.paper.latency import TARGETS
from simulator.paper.section import Section
from simulator.paper.table import Cell, Table

Pair: TypeAlias = tuple[list[Finding], list[Finding]]
"""A trace's runs of `midstream` and of `llumnix`."""


def scatter_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `scatter`."""
    found = of(findings, experiment="scatter")
    pairs: dict[str, Pair] = {
        f"{trace} {rates[1]:g}": (of(found, panel=trace, series="midstream"), of(found, panel=trace, series="llumnix"))
        for trace, rates in RATES.items()
    }
    pairs = {load: pair for load, pair in pairs.items() if pair[0]}
    seeds = sorted({each.run.seed for each in found})
    over = f"{len(seeds)} seeds, {seeds[0]} to {seeds[-1]}"
    ratios: list[tuple[Cell, ...]] = [(load, *(ratio(*pair, metric) for metric in METRICS)) for load, pair in pairs.items()]
    ratios.append(("**geometric mean**", *(_overall(list(pairs.values()), metric) for metric in METRICS)))
    ratios.append(("wanted, at most", *(TARGETS.get(metric) for metric in METRICS)))
    errors: list[tuple[Cell, ...]] = [(load, *(error_percent([pair], metric) for metric in METRICS)) for load, pair in pairs.items()]
    errors.append(("**geometric mean**", *(error_percent(list(pairs.values()), metric) for metric in METRICS)))
    header = ("trace, requests/s", *LABELS)
    return Section(
        "scatter",
        (
            Table("scatter", f"`midstream`, multiples of `llumnix`, middle rates, {over}", header, tuple(ratios)),
            Table(
                "scatter-errors", f"Standard error of these multiples, ± % (jackknife over the {len(seeds)} seeds)", header, tuple(errors)
            ),
        ),
    )


def error_percent(pairs: Sequence[Pair], metric: str) -> float | None:
    """The standard error of the geometric mean of these ratios, in percent of it, by leaving out one seed after the other (jackknife, of
    the logarithm). None if there are fewer than two seeds, or no ratio without one of them."""
    seeds = sorted({each.run.seed for runs, _ in pairs for each in runs})
    without = [_overall([(_but(runs, seed), _but(base, seed)) for runs, base in pairs], metric) for seed in seeds]
    known = [log(each) for each in without if each is not None]
    if len(known) < 2 or len(known) < len(without):
        return None
    middle = mean(known)
    return 100 * (exp(sqrt((len(known) - 1) / len(known) * sum((each - middle) ** 2 for each in known))) - 1)


def _overall(pairs: Sequence[Pair], metric: str) -> float | None:
    return geometric_mean(ratio(runs, base, metric) for runs, base in pairs)


def _but(findings: Sequence[Finding], seed: int) -> list[Finding]:
    return [each for each in findings if each.run.seed != seed]
