"""Scenarios on disk: a file of the user's, or the name of one that comes with Midstream."""

from dataclasses import replace
from pathlib import Path

from simulator.run import arrivals_of
from simulator.scenario import Scenario, ScenarioError, parse
from simulator.workload import Arrival, read_csv

SHIPPED = Path(__file__).parent / "scenarios"


def located(asked: Path) -> Path:
    """`asked` if it is there; else what comes with Midstream by that name ("s-s"). Raises ScenarioError."""
    if asked.exists():
        return asked
    known = {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
    if str(asked) not in known:
        raise ScenarioError(f"there is no file '{asked}', nor a scenario of that name; those that come with Midstream: {', '.join(known)}")
    return known[str(asked)]


def read_scenario(asked: Path) -> Scenario:
    """Without its arrivals. Raises OSError, ScenarioError."""
    path = located(asked)
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ScenarioError(f"'{path}' is not text: {error}") from error


def load(asked: Path, trace_file: Path | None) -> tuple[Scenario, list[Arrival]]:
    """A scenario and its arrivals; `trace_file` takes the place of the scenario's own workload.

    Raises OSError, ScenarioError, TraceError. A trace named in a scenario is looked for beside it.
    """
    scenario = read_scenario(asked)
    if trace_file is None and scenario.workload.file is not None:
        trace_file = located(asked).parent / scenario.workload.file
    if trace_file is None:
        return scenario, arrivals_of(scenario)
    with trace_file.open(newline="") as file:
        arrivals = read_csv(file)
    workload = replace(scenario.workload, trace=None, file=str(trace_file), rate=None)
    return replace(scenario, workload=workload), arrivals
