import json
from pathlib import Path

import pytest

from deploy import cli
from gateway.policy.config import LlumnixPolicy, MidstreamPolicy, RoundRobinPolicy
from simulator.plan import Need, Objectives, needs, picture
from simulator.run import simulate
from simulator.scenario import from_dict
from simulator.workload import Arrival

ARRIVALS = [Arrival(n * 0.05, 200, 60) for n in range(80)]
SCENARIO = from_dict({"workload": {"file": "none.csv"}, "cluster": {"capacity_blocks": 150}})


def test_it_finds_the_least_that_is_enough() -> None:
    objectives = Objectives(0.5, 1.0)
    (need,) = needs(SCENARIO, ARRIVALS, objectives, [MidstreamPolicy()], 16, lambda: 0.0)
    assert need.instances is not None
    assert 1 < need.instances < 16
    assert need.ttft_p99_s <= 0.5
    fewer = from_dict({"workload": {"file": "x"}, "cluster": {"capacity_blocks": 150, "instances": need.instances - 1}})
    assert not objectives.met_by(simulate(fewer, ARRIVALS, lambda: 0.0))


def test_what_cannot_be_had_is_said() -> None:
    rows = needs(SCENARIO, ARRIVALS, Objectives(1e-6, 1.0), [RoundRobinPolicy(), LlumnixPolicy()], 4, lambda: 0.0)
    assert [(row.policy, row.instances) for row in rows] == [("round_robin", None), ("llumnix", None)]
    drawn = picture([*rows, Need("midstream", 3, 0.1, 0.1, 1.0)], 4)
    assert drawn.count('height="24"') == 3
    assert drawn.count("more than 4") == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, drawing = tmp_path / "s.toml", tmp_path / "p.svg"
    scenario.write_text('[workload]\ntrace = "S-S"\nrate = 5\nrequests = 40\n')
    command = ["plan", str(scenario), "--policies", "llumnix,midstream", "--max-instances", "3", "--picture", str(drawing)]
    assert cli.main([*command, "--json"]) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == ["llumnix", "midstream"]
    assert drawing.read_text().startswith("<svg")
    assert cli.main([*command, "--ttft-p99", "0.000001"]) == 1
    assert "> 3" in capsys.readouterr().out
    assert cli.main(["plan", str(scenario), "--policies", "best"]) == 2
    assert "no policy 'best'" in capsys.readouterr().err
