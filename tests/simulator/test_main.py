import csv
import json
from pathlib import Path

import pytest

from deploy import cli
from simulator.__main__ import main

SCENARIO = '[workload]\ntrace = "S-S"\nrate = 20\nrequests = 60\nhigh_share = 0.2\n[cluster]\ninstances = 2\n'


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def test_json_has_every_figure(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", str(scenario), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary) == {
        *("ttft_s", "tpot_s", "e2e_s", "preemption_loss_s", "fragmentation", "preemptions"),
        *("migrations", "instances_mean", "tiers", "wall_s"),
    }
    assert set(summary["ttft_s"]) == {"mean", "p50", "p99"}
    assert set(summary["tiers"]) == {"high", "normal"}
    assert summary["instances_mean"] == 2
    assert summary["wall_s"] > 0


def test_the_table_shows_tiers(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(scenario)]) == 0
    shown = capsys.readouterr().out
    assert "midstream: 60 requests" in shown
    assert "first token, high" in shown


def test_a_trace_takes_the_workloads_place(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, rows = tmp_path / "trace.csv", tmp_path / "rows.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,tier\n0.5,30,4,batch\n0.1,20,3,normal\n")
    assert cli.main(["simulate", str(scenario), "--trace", str(trace), "--per-request", str(rows), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["tiers"]) == {"batch", "normal"}
    with rows.open() as file:
        read = list(csv.DictReader(file))
    assert [(row["arrival_s"], row["output_tokens"], row["tier"]) for row in read] == [
        ("0.100000", "3", "normal"),
        ("0.500000", "4", "batch"),
    ]
    assert all(float(row["e2e_s"]) >= float(row["ttft_s"]) > 0 for row in read)


def test_a_trace_named_in_the_scenario_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,20,3\n")
    path = tmp_path / "scenario.toml"
    path.write_text('[workload]\nfile = "trace.csv"\n')
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_s"]["mean"] > 0


@pytest.mark.parametrize(
    ("text", "complaint"), [(SCENARIO + "wheels = 3\n", "unknown key 'cluster.wheels'"), ('[workload]\nfile = "none.csv"\n', "none.csv")]
)
def test_faults_are_said_and_shown_in_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_trace_is_named_by_line(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,x,3\n")
    assert main([str(scenario), "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err
