"""`midstream paper`: runs experiments, then writes tables, pictures and the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from simulator.paper.decisions import decision_costs
from simulator.paper.experiment import EXPERIMENTS, Plan
from simulator.paper.finding import Finding
from simulator.paper.latency import fragmentation_section, latency_section
from simulator.paper.page import PICTURES, empty_page, filled
from simulator.paper.scale import stress_section
from simulator.paper.scaling import scaling_section, thresholds_section
from simulator.paper.scatter import scatter_section
from simulator.paper.section import Section
from simulator.paper.store import ResultStore, code_digest, results_of
from simulator.paper.urgency import priorities_section, weights_section
from simulator.scenario import ScenarioError

RUNNING = (1, 4, 16, 64, 128)
"""Requests on each instance, for the cost of decisions."""


@dataclass(frozen=True, slots=True)
class PaperOptions:
    """`out` gets `paper-results.md` and `paper-results/`. `experiments`: names; empty for all of them."""

    plan: Plan
    out: Path
    experiments: tuple[str, ...] = ()
    processes: int = 1


def run(options: PaperOptions, progress: Callable[[int, int], None]) -> list[Section]:
    """Run what is not kept yet, and write. Raises ScenarioError for an unknown experiment, OSError where nothing can be written."""
    names = options.experiments or tuple(EXPERIMENTS)
    for name in names:
        if name not in EXPERIMENTS:
            raise ScenarioError(f"there is no experiment '{name}'; there are {', '.join(EXPERIMENTS)}")
    runs = [run for name in names for run in EXPERIMENTS[name](options.plan)]
    if not runs:
        raise ScenarioError(f"there is nothing to run: --quick leaves out {', '.join(names)}")
    store = ResultStore(options.out / PICTURES / "runs", code_digest())
    findings = results_of(runs, store, options.processes, progress)
    played = {each.run.experiment for each in findings}
    sections = [_section(name, findings) for name in names if name in played]
    _write(options, sections)
    return sections


def _section(name: str, findings: Sequence[Finding]) -> Section:
    if name == "stress":
        scenario = next(each.run.scenario for each in findings if each.run.experiment == name)
        return stress_section(findings, decision_costs(scenario, RUNNING, perf_counter))
    return _SECTIONS[name](findings)


def _write(options: PaperOptions, sections: Sequence[Section]) -> None:
    directory = options.out / PICTURES
    directory.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for table in section.tables:
            (directory / f"{table.name}.csv").write_text(table.csv())
        if section.picture:
            (directory / f"{section.name}.svg").write_text(section.picture)
    page = options.out / "paper-results.md"
    old = page.read_text() if page.exists() else empty_page()
    page.write_text(filled(old, sections, note_of(options.plan)))


def note_of(plan: Plan) -> str:
    """How the figures came about."""
    seeds = ", ".join(str(seed) for seed in plan.seeds)
    quick = "`midstream paper --quick`" if plan.quick else "`midstream paper`"
    return f"{quick}, seed{'s' if len(plan.seeds) > 1 else ''} {seeds}, {plan.requests:,} requests a run"


_SECTIONS: dict[str, Callable[[Sequence[Finding]], Section]] = {
    "traces": latency_section,
    "scatter": scatter_section,
    "fragmentation": fragmentation_section,
    "priorities": priorities_section,
    "weights": weights_section,
    "scaling": scaling_section,
    "thresholds": thresholds_section,
}
