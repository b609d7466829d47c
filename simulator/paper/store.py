"""Runs what is not there yet, in processes of its own, and keeps one file per run: a command that was stopped goes on where it was.

A file's name is a digest of the run's scenario and of the code that determines the outcome, so that a result is never taken for another's.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from time import perf_counter

from simulator.paper.experiment import PaperRun
from simulator.paper.finding import Finding
from simulator.paper.result import RunResult, result_of
from simulator.run import arrivals_of, simulate
from simulator.scenario import Scenario, adapter

_ROOT = Path(__file__).resolve().parents[2]
CODE = (
    *(f"simulator.{name}" for name in ("autoscaler", "cluster", "fragmentation", "instance", "job", "lengths", "loop", "outcome")),
    *(f"simulator.{name}" for name in ("rebalancer", "run", "scenario", "transfer", "workload", "paper.result")),
    *(
        f"gateway.policy.{name}"
        for name in ("autoscale", "config", "dispatch", "elsewhere", "line", "load", "price", "rebalance", "tier", "view")
    ),
    *(f"backend.engine.{name}" for name in ("blocks", "model", "request", "shape")),
    *("backend.registry.instance", "backend.registry.store"),
    *(f"migration.{name}" for name in ("choice", "protocol", "settings", "stages")),
)
"""The modules that determine an outcome."""


def code_digest(root: Path = _ROOT) -> str:
    """Of their sources."""
    digest = hashlib.sha256()
    for module in CODE:
        digest.update(module.encode() + b"\0" + (root / module.replace(".", "/")).with_suffix(".py").read_bytes() + b"\0")
    return digest.hexdigest()


def key_of(scenario: Scenario, code: str) -> str:
    """The name of a run's file."""
    text = adapter().dump_json(scenario)
    return hashlib.sha256(code.encode() + text).hexdigest()[:24]


class ResultStore:
    """A directory of results. Raises OSError where it cannot be read or written."""

    def __init__(self, directory: Path, code: str) -> None:
        self._directory = directory
        self._code = code

    def read(self, scenario: Scenario) -> RunResult | None:
        """What is kept; None if nothing is, or not in this form."""
        try:
            return RunResult.from_json(self._path(scenario).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write(self, scenario: Scenario, result: RunResult) -> None:
        """Keep it; a reader sees all of it or nothing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(scenario)
        part = path.with_suffix(".part")
        part.write_text(result.to_json() + "\n")
        part.replace(path)

    def _path(self, scenario: Scenario) -> Path:
        return self._directory / f"{key_of(scenario, self._code)}.json"


def results_of(runs: Iterable[PaperRun], store: ResultStore, processes: int, progress: Callable[[int, int], None]) -> list[Finding]:
    """Every run's result, those that are kept already not run again. `progress` is told how many of how many simulations are done."""
    wanted = list(runs)
    missing = _distinct([run for run in wanted if store.read(run.scenario) is None])
    done = 0
    with ProcessPoolExecutor(max_workers=max(1, processes)) as pool:
        futures: dict[Future[RunResult], Scenario] = {pool.submit(run_one, scenario): scenario for scenario in missing}
        try:
            for future in as_completed(futures):
                store.write(futures[future], future.result())
                done += 1
                progress(done, len(missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    kept = [(run, store.read(run.scenario)) for run in wanted]
    return [Finding(run, result) for run, result in kept if result is not None]


def run_one(scenario: Scenario) -> RunResult:
    """One simulation, in whichever process this is."""
    return result_of(simulate(scenario, arrivals_of(scenario), perf_counter))


def _distinct(runs: Sequence[PaperRun]) -> list[Scenario]:
    """Each scenario once, in order. (Scenarios hold mappings, so they do not hash; their text does.)"""
    return list({key_of(run.scenario, ""): run.scenario for run in runs}.values())
