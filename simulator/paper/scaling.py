"""PURE. Figures 14 and 15: how many instances each rule uses, and what latency that buys."""

from collections.abc import Sequence

from simulator.outcome import mean
from simulator.paper.chart import Line, Panel, grid
from simulator.paper.finding import Finding, average, crossing, of
from simulator.paper.floor import floor_instances
from simulator.paper.section import Section
from simulator.paper.table import Cell, Table
from simulator.run import arrivals_of

EQUAL_TTFT_S = 5.0
_COLUMNS = (
    ("instances", ""),
    ("TTFT P99, s", "ttft_p99"),
    ("TTFT, s", "ttft_mean"),
    ("TPOT, s", "tpot_mean"),
    ("end-to-end, s", "e2e_mean"),
)


def scaling_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `scaling`."""
    found = of(findings, experiment="scaling")
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for panel in dict.fromkeys(each.run.panel for each in found):
        here = of(found, panel=panel)
        names = list(dict.fromkeys(each.run.series for each in here))
        for x in sorted({each.run.x for each in here}):
            base = instances(of(here, x=x, series="infaas"))
            for name in names:
                runs = of(here, x=x, series=name)
                saved = 100 * (1 - instances(runs) / base) if base else None
                rows.append((f"{panel} {x:g}", name, *_figures(runs), saved, _floor(runs)))
        for title, metric in _COLUMNS[:4]:
            lines = tuple(Line(name, _points(of(here, series=name), metric)) for name in names)
            panels.append(Panel(title, panel, lines, log=metric == "ttft_p99"))
    header = ("load", "policy", *(title for title, _ in _COLUMNS), "fewer than infaas, %", "floor")
    table = Table("scaling", "L-L: as many instances as the load asks for", header, tuple(rows))
    return Section("scaling", (table,), grid("Auto-scaling", panels, 4), "Instances and latencies by rate, burstiness and start-up time")


def thresholds_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `thresholds`: what equal latency costs."""
    found = of(findings, experiment="thresholds")
    names = list(dict.fromkeys(each.run.series for each in found))
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        runs = of(found, series=name)
        rows += [(name, x, *_figures(of(runs, x=x))) for x in sorted({each.run.x for each in runs})]
    table = Table("thresholds", "L-L at 2.0, CV 5, by threshold", ("policy", "threshold", *(title for title, _ in _COLUMNS)), tuple(rows))
    curves = {metric: {name: _curve(of(found, series=name), metric) for name in names} for metric in ("ttft_p99", "tpot_mean")}
    panels = [
        Panel(title, "instances", tuple(Line(name, tuple(sorted(curves[metric][name]))) for name in names), log=metric == "ttft_p99")
        for title, metric in (("TTFT P99, s", "ttft_p99"), ("TPOT, s", "tpot_mean"))
    ]
    return Section("thresholds", (table, _equal(curves, names)), grid("Cost and latency", panels, 2), "Latency over instances paid for")


def instances(runs: Sequence[Finding]) -> float:
    """In use, in the mean over time and seeds."""
    return mean([each.result.instances_mean for each in runs])


def _equal(curves: dict[str, dict[str, list[tuple[float, float]]]], names: Sequence[str]) -> Table:
    """Instances at the same latency. The decode mean that is compared at is that of `infaas` in the middle of its curve."""
    middle = sorted(curves["tpot_mean"].get("infaas", []))
    wanted = {"ttft_p99": EQUAL_TTFT_S, "tpot_mean": middle[len(middle) // 2][1] if middle else 0.0}
    rows: list[tuple[Cell, ...]] = []
    for metric, label in (("ttft_p99", "TTFT P99"), ("tpot_mean", "TPOT mean")):
        needed = {name: crossing(curves[metric][name], wanted[metric]) for name in names}
        if metric == "tpot_mean" and middle:
            needed["infaas"] = middle[len(middle) // 2][0]
        base = needed.get("infaas")
        for name in names:
            cost = needed[name]
            saved = None if cost is None or not base else 100 * (1 - cost / base)
            rows.append((f"{label} {wanted[metric]:.3g} s", name, cost, saved))
    return Table("thresholds-equal", "Instances at equal latency", ("at", "policy", "instances", "fewer than infaas, %"), tuple(rows))


def _figures(runs: Sequence[Finding]) -> list[float]:
    return [instances(runs), *(average(runs, metric) for _, metric in _COLUMNS[1:])]


def _curve(runs: Sequence[Finding], metric: str) -> list[tuple[float, float]]:
    xs = sorted({each.run.x for each in runs})
    return [(instances(of(runs, x=x)), average(of(runs, x=x), metric)) for x in xs]


def _points(runs: Sequence[Finding], metric: str) -> tuple[tuple[float, float], ...]:
    xs = sorted({each.run.x for each in runs})
    return tuple((x, average(of(runs, x=x), metric) if metric else instances(of(runs, x=x))) for x in xs)


def _floor(runs: Sequence[Finding]) -> float:
    """Means over seeds, each over the time its run took."""
    return mean([floor_instances(each.run.scenario, arrivals_of(each.run.scenario), each.result.duration_s) for each in runs])
