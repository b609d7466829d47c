from pathlib import Path

import pytest

from deploy import cli
from simulator.scenario import ScenarioError
from simulator.scenario_file import SHIPPED, load, located, read_scenario
from simulator.workload import TraceError


def test_a_scenario_that_comes_with_midstream_goes_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert located(Path("s-s")) == SHIPPED / "s-s.toml"
    assert cli.main(["simulate", "live-cpu"]) == 0
    assert "least_outstanding: 90 requests" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_each_can_be_read_and_has_its_arrivals(path: Path) -> None:
    _, arrivals = load(Path(path.stem), None)
    assert arrivals


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s-s").write_text('[workload]\ntrace = "L-L"\nrate = 3\nrequests = 7\n')
    monkeypatch.chdir(tmp_path)
    scenario, arrivals = load(Path("s-s"), None)
    assert scenario.workload.trace == "L-L"
    assert len(arrivals) == 7


def test_an_unknown_name_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ScenarioError, match=r"no file 'nowhere\.toml', nor a scenario of that name; .*: autoscale, burstgpt, .*, s-s, sharegpt"
    ):
        read_scenario(Path("nowhere.toml"))
    for command in (["simulate", "s-s.csv"], ["plan", "s-s.csv"], ["compare", "s-s.csv"], ["replay", "s-s.csv", "--engine-env"]):
        assert cli.main(command) == 2
        assert "error: there is no file 's-s.csv'" in capsys.readouterr().err


def test_what_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="is not text"):
        read_scenario(tmp_path / "a.toml")


def test_a_trace_lies_beside_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[workload]\nfile = "a.csv"\n')
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "a.toml", None)
    (tmp_path / "a.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.5,30,4\n")
    _, arrivals = load(tmp_path / "a.toml", None)
    assert [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in arrivals] == [(0.5, 30, 4)]
    (tmp_path / "a.csv").write_text("nothing\n")
    with pytest.raises(TraceError):
        load(tmp_path / "a.toml", None)
