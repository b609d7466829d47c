"""PURE. Figure 16: 64 instances under a rising rate, and what a decision costs there."""

from collections.abc import Sequence

from simulator.outcome import mean
from simulator.paper.chart import Line, Panel, grid
from simulator.paper.decisions import DecisionCost
from simulator.paper.finding import Finding, average, of
from simulator.paper.section import Section
from simulator.paper.table import Cell, Table

_COLUMNS = (("end-to-end, s", "e2e_mean"), ("TTFT, s", "ttft_mean"), ("TTFT P99, s", "ttft_p99"), ("TPOT, s", "tpot_mean"))


def stress_section(findings: Sequence[Finding], costs: Sequence[DecisionCost]) -> Section:
    """Of the experiment `stress`. `costs` were measured on the machine that ran it."""
    found = of(findings, experiment="stress")
    rows: list[tuple[Cell, ...]] = []
    names = list(dict.fromkeys(each.run.series for each in found))
    for rate in sorted({each.run.x for each in found}):
        for name in names:
            runs = of(found, x=rate, series=name)
            moves = mean([each.result.migrations for each in runs])
            rows.append((rate, name, *(average(runs, metric) for _, metric in _COLUMNS), moves))
    table = Table(
        "stress", "64 instances, 64 tokens in and out", ("requests/s", "policy", *(title for title, _ in _COLUMNS), "moves"), tuple(rows)
    )
    rates = sorted({each.run.x for each in found})
    panels = [
        Panel(
            title,
            "requests/s",
            tuple(Line(name, tuple((x, average(of(found, series=name, x=x), metric)) for x in rates)) for name in names),
        )
        for title, metric in _COLUMNS
    ]
    decisions = Table(
        "decisions",
        "What a decision over 64 instances takes, microseconds",
        ("running requests on each", "place one request", "pair for memory", "offer for price", "one source's own choice"),
        tuple((each.running, each.bind_us, each.pair_us, each.offer_us, each.choose_us) for each in costs),
    )
    return Section("stress", (table, decisions), grid("64 instances", panels, 4), "Latencies of 64 instances under a rising rate")
