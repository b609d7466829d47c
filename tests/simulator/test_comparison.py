from math import inf
from pathlib import Path

import pytest

from deploy import cli
from simulator.comparison import NAMES, Figures, ratios
from simulator.outcome import Outcome, RequestOutcome


def figures(*values: float) -> Figures:
    return Figures(*values)


def test_figures_of_a_run() -> None:
    requests = tuple(RequestOutcome(0.0, 10 + n, 5, "normal", float(n), 0.1, n + 1.0, 0.5, 1, 0, "i") for n in range(100))
    found = Figures.of(Outcome(requests, (), 0, 1.0))
    assert found.values() == pytest.approx((50.5, 49.5, 98.0, 0.1, 0.1, 0.5, 99.0))
    assert len(found.values()) == len(NAMES)


def test_ratios_are_geometric_means_over_seeds() -> None:
    runs = [figures(1, 2, 2, 2, 2, 0, 0), figures(1, 8, 2, 2, 2, 0, 1)]
    base = [figures(1, 1, 1, 4, 2, 0, 0), figures(1, 1, 1, 4, 2, 0, 0)]
    assert ratios(runs, base) == pytest.approx((1, 4, 2, 0.5, 1, 1, inf))
    assert ratios(base, [figures(1, 1, 1, 4, 2, 5, 5)] * 2)[-1] == 0.0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text('[workload]\ntrace = "S-S"\nrate = 20\nrequests = 40\n[cluster]\ninstances = 2\n')
    assert cli.main(["compare", str(scenario), "--policies", "infaas,midstream", "--seeds", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["llumnix", "infaas", "midstream"]
    assert lines[2].count("x") == len(NAMES)
    assert cli.main(["compare", str(scenario), "--policies", "best"]) == 2
    assert "no policy 'best'" in capsys.readouterr().err
