"""A quarter of a minute, as it is typed: too short to say what grows, long enough to show that all figures come."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(180)
def test_a_short_run() -> None:
    command = [sys.executable, "-m", "deploy.cli", "soak", "--json", "--minutes", "0.25"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert (report["wrong"], report["lost"], report["truncated"]) == (0, 0, 0), run.stderr
    assert report["streams"] > 20
    assert set(report["leaked"].values()) == {0}
    assert set(report["processes"]) == {"redis", "gateway-1", "gateway-2", *(f"backend-{number}" for number in range(1, 5))}
    assert all(one["memory_kib"] > 0 and one["descriptors"] > 0 for one in report["processes"].values())
    assert set(report["gauges"]) == set(report["processes"]) - {"redis"}
    assert all(value == 0 for gauges in report["gauges"].values() for value in gauges.values())
    assert all(gauges for gauges in report["gauges"].values())
