"""The bench of dispatching: one tiny run on the real Redis, and its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.dispatch import Step, summary
from bench.dispatch_worker import Dispatched


def test_figures() -> None:
    told = [
        Dispatched([0.001, 0.003], {"a": 2}, 1.0, [0.0001], 0),
        Dispatched([0.002, 0.004], {"a": 1, "b": 1}, 2.0, [0.0002], 1),
    ]
    row = summary(Step(4, 2, 100.0, 2.0), told, 0.5)
    assert (row["dispatched"], row["claims_per_s"], row["conflicts"], row["errors"]) == (4, 2.0, 3.0, 1)
    assert row["dispatch_ms"] == {"p50": 2.0, "p99": 4.0}
    assert (row["spread"], row["redis_cpu_share"]) == ({"most": 3.0, "least": 0.0}, 0.25)


@pytest.mark.timeout(180)
def test_one_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "bench", "dispatch", "--json", "--instances", "4", "--gateways", "2"]
    run = subprocess.run(
        [*command, "--rates", "50", "--seconds", "1"],
        env={**os.environ, "MIDSTREAM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)["steps"]
    assert row["errors"] == 0
    assert 20 < row["dispatched"] < 100
    assert row["spread"]["least"] > 0.5
