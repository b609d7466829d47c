import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.paper import store
from simulator.paper.experiment import Plan, fragmentation, traces
from simulator.paper.result import RunResult, TierFigures
from simulator.paper.store import CODE, ResultStore, code_digest, key_of, results_of, run_one
from simulator.scenario import Scenario, from_dict

ROOT = Path(__file__).resolve().parents[3]
RESULT = RunResult((TierFigures("all", 3, 1.0, 2.0, 0.1, 0.1, 0.2, 0.03, 0.04, 0.0, 0.2),), (0.0, 0.25), 1, 2, 16.0, 60.0, 0.5)


def scenario(seed: int = 1, requests: int = 20) -> Scenario:
    return from_dict({"workload": {"trace": "S-S", "rate": 5, "requests": requests, "seed": seed}})


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = ResultStore(tmp_path, "code")
    assert kept.read(scenario()) is None
    kept.write(scenario(), RESULT)
    assert kept.read(scenario()) == RESULT
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_other_inputs_and_other_code_have_other_results(tmp_path: Path) -> None:
    ResultStore(tmp_path, "code").write(scenario(), RESULT)
    assert ResultStore(tmp_path, "code").read(scenario(seed=2)) is None
    assert ResultStore(tmp_path, "other").read(scenario()) is None
    assert key_of(scenario(), "a") != key_of(scenario(), "b")


def test_a_torn_file_is_no_result(tmp_path: Path) -> None:
    kept = ResultStore(tmp_path, "code")
    kept.write(scenario(), RESULT)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:40])
    assert kept.read(scenario()) is None


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    plan = Plan(seeds=(1,), requests=15, quick=True)
    runs = [run for run in traces(plan) if run.panel in ("S-S", "M-M")]
    kept = ResultStore(tmp_path, "code")
    told: list[tuple[int, int]] = []
    first = results_of(runs[:5], kept, 2, lambda done, of: told.append((done, of)))
    assert told == [(n, 5) for n in range(1, 6)]
    told.clear()
    both = results_of(runs, kept, 1, lambda done, of: told.append((done, of)))
    assert told == [(n, 3) for n in range(1, 4)]
    assert both[:5] == first
    assert [each.run for each in both] == runs


def test_a_scenario_that_two_experiments_need_runs_once(tmp_path: Path) -> None:
    plan = Plan(seeds=(1,), requests=10, quick=True)
    runs = [run for run in (*traces(plan), *fragmentation(plan)) if run.panel == "M-M"]
    told: list[int] = []
    found = results_of(runs, ResultStore(tmp_path, "code"), 1, lambda done, of: told.append(of))
    assert len(found) == 8
    assert set(told) == {4}


def test_a_failing_run_fails_the_command_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scenario: Scenario) -> RunResult:
        if scenario.workload.seed == 3:
            raise ArithmeticError("broken")
        return run_one(scenario)

    runs = [run for run in fragmentation(Plan(seeds=(1, 2, 3), requests=10)) if run.series == "infaas"]
    kept = ResultStore(tmp_path, "code")
    monkeypatch.setattr(store, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(store, "run_one", fail)
    with pytest.raises(ArithmeticError):
        results_of(runs, kept, 1, lambda done, of: None)
    assert sum(kept.read(run.scenario) is not None for run in runs) <= 2


def test_every_module_that_a_run_loads_is_in_the_digest() -> None:
    ours = "('simulator', 'gateway', 'backend', 'migration')"
    code = f"import simulator.run, sys, json; print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in {ours}]))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    loaded = {Path(name).relative_to(ROOT) for name in json.loads(shown.stdout) if name is not None}
    digested = {path.relative_to(ROOT) for pattern in CODE for path in ROOT.glob(pattern)}
    assert not {path for path in loaded - digested if path.name != "__init__.py"}
    assert len(code_digest()) == 64


class Inline:
    """A pool that is this process."""

    def __init__(self, max_workers: int) -> None:
        self.futures: list[object] = []

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def shutdown(self, **how: bool) -> None:
        pass

    def submit(self, action: "object", scenario: Scenario) -> object:
        from concurrent.futures import Future

        future: Future[RunResult] = Future()
        assert callable(action)
        try:
            future.set_result(action(scenario))
        except ArithmeticError as error:
            future.set_exception(error)
        return future
