"""PURE. Figures 11 and 12: latencies of the seven traces under four policies, beside what the paper and our own study claim; and memory
that is free and of no use."""

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.outcome import mean
from simulator.paper.chart import Line, Panel, grid
from simulator.paper.experiment import POLICIES, RATES, REAL_TRACES
from simulator.paper.finding import LABELS, METRICS, Finding, average, geometric_mean, of, ratio
from simulator.paper.section import Section
from simulator.paper.table import Cell, Table

_OTHERS = ("midstream", "infaas", "round_robin")
GENERATED_TRACES = tuple(trace for trace in RATES if trace not in REAL_TRACES)
TARGETS: dict[str, float] = {
    "e2e_mean": 0.94,
    "ttft_mean": 0.53,
    "ttft_p99": 0.38,
    "tpot_mean": 0.91,
    "tpot_p99": 0.87,
    "preemption_loss": 0.75,
    "longest_ttft": 0.95,
}
"""What `midstream` is to reach, `llumnix` being 1."""
STUDY: dict[str, float] = {"ttft_mean": 2.0, "ttft_p99": 1.45, "tpot_p99": 1.44, "preemption_loss": 5.1}
"""`infaas` over `llumnix` in an independent simulation of the paper's setting."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something the paper measured: how many times better Llumnix is than `base`, at most, over these traces and all rates."""

    text: str
    base: str
    traces: tuple[str, ...]
    metric: str
    paper: float
    study: float


CLAIMS = (
    Claim("end-to-end mean, real traces", "round_robin", REAL_TRACES, "e2e_mean", 2.0, 1.8),
    Claim("end-to-end P99, real traces", "round_robin", REAL_TRACES, "e2e_p99", 2.9, 1.9),
    Claim("prefill mean, real traces", "round_robin", REAL_TRACES, "ttft_mean", 26.6, 54.0),
    Claim("prefill P99, real traces", "round_robin", REAL_TRACES, "ttft_p99", 34.4, 73.0),
    Claim("prefill mean, real traces", "infaas", REAL_TRACES, "ttft_mean", 2.2, 1.8),
    Claim("prefill P99, real traces", "infaas", REAL_TRACES, "ttft_p99", 5.5, 1.9),
    Claim("decode P99, real traces", "infaas", REAL_TRACES, "tpot_p99", 1.3, 1.6),
    Claim("prefill mean, generated traces", "infaas", GENERATED_TRACES, "ttft_mean", 7.7, 4.1),
    Claim("prefill P99, generated traces", "infaas", GENERATED_TRACES, "ttft_p99", 14.8, 6.8),
    Claim("decode P99, generated traces", "infaas", GENERATED_TRACES, "tpot_p99", 2.0, 2.3),
)


def latency_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `traces`."""
    found = of(findings, experiment="traces")
    middle = {trace: rates[1] for trace, rates in RATES.items() if of(found, panel=trace)}
    tables = [_ratios(found, middle, name) for name in _OTHERS]
    return Section(
        "traces",
        (_base(found), *tables, _levels(found), _claims(found)),
        _latencies(found),
        "Latencies of seven traces by rate, four policies",
    )


def fragmentation_section(findings: Sequence[Finding]) -> Section:
    """Of the experiment `fragmentation`."""
    found = of(findings, experiment="fragmentation")
    rows: list[tuple[Cell, ...]] = []
    lines = []
    for name in POLICIES:
        runs = of(found, series=name)
        if not runs:
            continue
        whole, worst = (100 * mean([getattr(each.result, kind) for each in runs]) for kind in ("fragmentation_mean", "fragmentation_worst"))
        rows.append((name, whole, worst))
        points = tuple((10.0 * at, 100 * share) for at, share in enumerate(runs[0].result.fragmentation))
        lines.append(Line(name, points))
    table = Table("fragmentation", "Memory that is free and of no use, % of all (M-M)", ("policy", "whole run", "worst 300 s"), tuple(rows))
    panels = [Panel(line.name, "s", (line,)) for line in lines]
    return Section("fragmentation", (table,), grid("Fragmentation, %", panels, 4), "Fragmented memory over time, % of all")


def _base(found: Sequence[Finding]) -> Table:
    """How near to saturation each rate is."""
    rows: list[tuple[Cell, ...]] = []
    for trace, rate in dict.fromkeys((each.run.panel, each.run.x) for each in found):
        runs = of(found, panel=trace, x=rate, series="llumnix")
        figures = [average(runs, metric) for metric in ("ttft_p50", *METRICS)]
        rows.append((trace, rate, *figures))
    return Table("traces-llumnix", "`llumnix`, seconds (means over seeds)", ("trace", "requests/s", "TTFT P50", *LABELS), tuple(rows))


def _ratios(found: Sequence[Finding], middle: dict[str, float], name: str) -> Table:
    """One policy over `llumnix`, at the middle rates."""
    rows: list[tuple[Cell, ...]] = []
    columns: dict[str, list[float | None]] = {metric: [] for metric in METRICS}
    for trace, rate in middle.items():
        runs, base = (of(found, panel=trace, x=rate, series=series) for series in (name, "llumnix"))
        values = [ratio(runs, base, metric) for metric in METRICS]
        for metric, each in zip(METRICS, values, strict=True):
            columns[metric].append(each)
        rows.append((f"{trace} {rate:g}", *values))
    rows.append(("**geometric mean**", *(geometric_mean(columns[metric]) for metric in METRICS)))
    wanted = {"midstream": ("wanted, at most", TARGETS), "infaas": ("the study's", STUDY)}.get(name)
    if wanted is not None:
        rows.append((wanted[0], *(wanted[1].get(metric) for metric in METRICS)))
    return Table(f"traces-{name}", f"`{name}`, multiples of `llumnix`, middle rates", ("trace, requests/s", *LABELS), tuple(rows))


def _levels(found: Sequence[Finding]) -> Table:
    """What the three rates of all traces have in common: each policy over `llumnix`, geometric means over the traces."""
    rows: list[tuple[Cell, ...]] = []
    for name in _OTHERS:
        for level, title in enumerate(("low", "middle", "high")):
            pairs = [[of(found, panel=trace, x=rates[level], series=each) for each in (name, "llumnix")] for trace, rates in RATES.items()]
            if any(runs for runs, _ in pairs):
                rows.append((name, title, *(geometric_mean(ratio(runs, base, metric) for runs, base in pairs) for metric in METRICS)))
    header = ("policy", "rates", *LABELS)
    return Table("traces-by-rate", "Multiples of `llumnix` by rate, geometric means over the traces", header, tuple(rows))


def _claims(found: Sequence[Finding]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for claim in CLAIMS:
        best = {name: _largest(found, claim, name) for name in ("llumnix", "midstream")}
        rows.append((f"{claim.text}, against {claim.base}", claim.paper, claim.study, best["llumnix"], best["midstream"]))
    for base, paper, study in (("round_robin", 0.84, 0.77), ("infaas", 0.704, 0.66)):
        saved = [_saved_loss(found, base, name) for name in ("llumnix", "midstream")]
        rows.append((f"preemption loss saved, against {base}", paper, study, *saved))
    header = ("how many times better, at most, over traces and rates", "paper", "study", "`llumnix` here", "`midstream` here")
    return Table("traces-claims", "The paper's claims", header, tuple(rows))


def _largest(found: Sequence[Finding], claim: Claim, name: str) -> float | None:
    values = []
    for trace in claim.traces:
        for rate in {each.run.x for each in of(found, panel=trace)}:
            base, runs = (of(found, panel=trace, x=rate, series=series) for series in (claim.base, name))
            values.append(ratio(base, runs, claim.metric))
    return max((each for each in values if each is not None), default=None)


def _saved_loss(found: Sequence[Finding], base: str, name: str) -> float | None:
    """Share of the loss that is gone, of the sum over all traces and rates."""
    below = average(of(found, series=base), "preemption_loss")
    return 1 - average(of(found, series=name), "preemption_loss") / below if below > 0 else None


def _latencies(found: Sequence[Finding]) -> str:
    panels = []
    for trace in RATES:
        here = of(found, panel=trace)
        for metric, label in zip(
            METRICS[:-1], ("end-to-end", "end-to-end P99", "TTFT", "TTFT P99", "TPOT", "TPOT P99", "loss"), strict=True
        ):
            lines = []
            for name in POLICIES:
                rates = sorted({each.run.x for each in here})
                lines.append(Line(name, tuple((rate, average(of(here, series=name, x=rate), metric)) for rate in rates)))
            if here:
                panels.append(Panel(f"{trace}: {label}, s", "requests/s", tuple(lines), log=metric.startswith("ttft")))
    return grid("Latencies by rate", panels, 7)
