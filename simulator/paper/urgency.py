"""PURE. Figure 13: what urgent requests gain and what the others pay, over the burstiness of arrivals, and over the weight."""

from collections.abc import Sequence

from simulator.paper.chart import Line, Panel, grid
from simulator.paper.finding import Finding, geometric_mean, of, ratio
from simulator.paper.section import Section
from simulator.paper.table import Cell, Table

BASE = "llumnix, blind"
HEADER = (
    "high: end-to-end, x better",
    "TPOT, x",
    "TTFT, x",
    "TTFT P99, x",
    "normal: end-to-end, %",
    "TPOT, %",
    "TTFT, %",
)
_HIGH = ("e2e_mean", "tpot_mean", "ttft_mean", "ttft_p99")
_NORMAL = ("e2e_mean", "tpot_mean", "ttft_mean")


def priorities_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `priorities`: against `llumnix` that is blind to tiers."""
    found = of(findings, experiment="priorities")
    rows: list[tuple[Cell, ...]] = []
    panels: list[Panel] = []
    for trace in dict.fromkeys(each.run.panel for each in found):
        here = of(found, panel=trace)
        others = [name for name in dict.fromkeys(each.run.series for each in here) if name != BASE]
        for name in others:
            spread = []
            for cv in sorted({each.run.x for each in here}):
                cells = compared(of(here, series=name, x=cv), of(here, series=BASE, x=cv))
                spread.append((cv, cells))
                rows.append((f"{trace}, CV {cv:g}", name, *cells))
            rows.append((f"{trace}, all", name, *_overall([cells for _, cells in spread])))
        panels += [_panel(here, trace, others, column) for column in range(len(HEADER))]
    rows.append(("wanted", "midstream", 1.35, 1.4, 1.0, None, 2.0, 0.0, 5.0))
    table = Table("priorities", "10 % urgent requests, against `llumnix` blind to tiers", ("load", "policy", *HEADER), tuple(rows))
    return Section(
        "priorities", (table,), grid("Urgent requests", panels, len(HEADER)), "What urgent requests gain, and what the others pay"
    )


def weights_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `weights`."""
    found = of(findings, experiment="weights")
    base = of(found, series=BASE)
    weights = sorted({each.run.x for each in found if each.run.series != BASE})
    cells = {weight: compared(of(found, series="midstream", x=weight), base) for weight in weights}
    panels = []
    for column, name in enumerate(HEADER):
        points = tuple((weight, cell) for weight in weights if (cell := cells[weight][column]) is not None)
        panels.append(Panel(name, "weight", (Line("midstream", points),)))
    rows = tuple((weight, *cells[weight]) for weight in weights)
    table = Table("weights", "S-S, CV 4: the weight of urgent requests", ("weight", *HEADER), rows)
    return Section("weights", (table,), grid("The weight", panels, len(HEADER)), "What the weight of urgent requests buys")


def compared(runs: Sequence[Finding], base: Sequence[Finding]) -> list[float | None]:
    """The cells under HEADER."""
    high = [ratio(base, runs, metric, "high") for metric in _HIGH]
    normal = [ratio(runs, base, metric, "normal") for metric in _NORMAL]
    return [*high, *(None if each is None else 100 * (each - 1) for each in normal)]


def _overall(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Geometric means of the columns, changes as ratios."""
    columns = list(zip(*rows, strict=True))
    better = [geometric_mean(column) for column in columns[: len(_HIGH)]]
    ratios = [geometric_mean([None if each is None else 1 + each / 100 for each in column]) for column in columns[len(_HIGH) :]]
    return [*better, *(None if each is None else 100 * (each - 1) for each in ratios)]


def _panel(here: Sequence[Finding], trace: str, names: Sequence[str], column: int) -> Panel:
    lines = []
    for name in names:
        points = []
        for cv in sorted({each.run.x for each in here}):
            cell = compared(of(here, series=name, x=cv), of(here, series=BASE, x=cv))[column]
            if cell is not None:
                points.append((cv, cell))
        lines.append(Line(name, tuple(points)))
    return Panel(f"{trace}: {HEADER[column]}", "CV", tuple(lines))
