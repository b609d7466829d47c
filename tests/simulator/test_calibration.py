from pathlib import Path

import pytest

from backend.engine.fake.settings import FakeSettings
from deploy import cli
from simulator.calibration import Agreement, Measured, agreements, engine_environment, table
from simulator.outcome import Outcome, RequestOutcome
from simulator.scenario import from_dict

SCENARIO = from_dict({"workload": {"trace": "S-S", "rate": 4}, "cluster": {"capacity_blocks": 400, "prefill": "first"}})


def simulated(*times: tuple[float, float | None, float]) -> Outcome:
    return Outcome(tuple(RequestOutcome(0.0, 10, 3, "normal", *each, 0.0, 0, 0, "i0") for each in times), (), 0, 1.0)


def test_live_times_are_brought_to_the_scenarios() -> None:
    live = [Measured(0.4, 0.04, 2.0, 3), Measured(0.2, None, 2.0, 1)]
    rows = agreements(live, 2.0, simulated((0.2, 0.02, 1.3), (0.1, None, 1.3)))
    assert [(row.figure, row.live_s) for row in rows] == [("TTFT", pytest.approx(0.15)), ("TPOT", 0.02), ("end to end", 1.0)]
    assert [row.within() for row in rows] == [True, True, False]
    assert rows[2].deviation == pytest.approx(0.3)
    assert table(rows).count("not within 15 %") == 1


def test_what_was_not_answered_is_left_out_on_both_sides() -> None:
    rows = agreements([None, Measured(0.1, 0.01, 1.0, 3)], 1.0, simulated((50.0, 5.0, 500.0), (0.1, 0.01, 1.0)))
    assert [row.deviation for row in rows] == pytest.approx([0.0, 0.0, 0.0])
    with pytest.raises(ValueError):
        agreements([None], 1.0, simulated())


def test_nothing_live_agrees_with_nothing() -> None:
    assert not Agreement("TTFT", 0.0, 0.1).within()


def test_fake_engines_become_the_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment(SCENARIO, 3.0).items():
        monkeypatch.setenv(name, value)
    settings = FakeSettings(_env_file=None)
    slow, shape = settings.shape(), SCENARIO.shape()
    assert (slow.capacity_blocks, slow.block_tokens, slow.watermark, slow.style) == (400, 16, shape.watermark, shape.style)
    assert (slow.max_batch, slow.max_prefill_tokens, slow.max_model_tokens) == (shape.max_batch, shape.max_prefill_tokens, 6400)
    assert slow.cost.step_s(3, 100, 50, 2500) == pytest.approx(3 * shape.cost.step_s(3, 100, 50, 2500))
    assert settings.time_scale == 3.0
    assert not settings.prefix_cache


def test_the_command_tells_the_engines_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text('[workload]\ntrace = "S-S"\nrate = 4\n[cluster]\ncapacity_blocks = 300\n')
    assert cli.main(["replay", str(scenario), "--engine-env", "--time-scale", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "MIDSTREAM_FAKE_CAPACITY_BLOCKS=300" in shown
    assert "MIDSTREAM_FAKE_TIME_SCALE=2.0" in shown
    assert cli.main(["replay", str(scenario)]) == 2
    assert "--url is needed" in capsys.readouterr().err


def test_the_command_says_if_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text('[workload]\ntrace = "S-S"\nrate = 1000\nrequests = 3\n')
    assert cli.main(["replay", str(scenario), "--url", "http://127.0.0.1:9"]) == 2
    assert "no request was answered" in capsys.readouterr().err
