import json
from pathlib import Path

import pytest

from deploy import cli
from simulator.paper.decisions import decision_costs
from simulator.scenario import from_dict


def test_it_writes_tables_pictures_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["paper", "--quick", "--out", str(tmp_path), "--requests", "12", "--experiments", "traces,fragmentation", "--processes", "1"]
    assert cli.main([*asked, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert {"traces-midstream", "traces-claims", "fragmentation"} <= set(tables)
    assert len(list((tmp_path / "paper-results" / "runs").glob("*.json"))) == 28
    assert (tmp_path / "paper-results" / "traces.svg").read_text().startswith("<svg")
    assert (tmp_path / "paper-results" / "traces-midstream.csv").exists()
    page = (tmp_path / "paper-results.md").read_text()
    assert "`midstream paper --quick`, seed 1, 12 requests a run" in page
    assert cli.main(asked) == 0
    assert "**The paper's claims**" in capsys.readouterr().out
    assert (tmp_path / "paper-results.md").read_text() == page


def test_an_unknown_experiment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "--out", str(tmp_path), "--experiments", "tracse"]) == 2
    assert "no experiment 'tracse'; there are traces" in capsys.readouterr().err


def test_nothing_to_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", "--quick", "--out", str(tmp_path), "--experiments", "scatter"]) == 2
    assert "--quick leaves out scatter" in capsys.readouterr().err


def test_the_cost_of_decisions_is_measured_for_each_load() -> None:
    ticks = iter(range(100_000))
    scenario = from_dict({"workload": {"trace": "64-64", "rate": 1}, "cluster": {"instances": 5}})
    few, many = decision_costs(scenario, (1, 40), lambda: float(next(ticks)))
    assert (few.running, many.running) == (1, 40)
    assert few.bind_us == many.bind_us == 1e6
