"""A short run, as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos.plan import MIGRATE, Fault

ROOT = Path(__file__).resolve().parents[3]
ITERATIONS = 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def test_a_short_run_finds_nothing_wrong_and_nothing_left_held(engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="the light environment has no vllm")
    command = [sys.executable, "-m", "deploy.cli", "chaos", "--json", "--engine", engine, "--iterations", str(ITERATIONS), "--seed", "4"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert list(report) == [
        *(
            "iterations",
            "streams",
            "moved",
            "resumed",
            "retried",
            "reconnected",
            "wrong",
            "lost",
            "truncated",
            "leaked",
            "max_stall_ms",
            "faults",
        )
    ]
    assert set(report["faults"]) == {fault.value for fault in Fault} | {MIGRATE}
    assert sum(count for kind, count in report["faults"].items() if kind != MIGRATE) == report["iterations"] == ITERATIONS
    assert report["streams"] == 10 * ITERATIONS
    assert (report["wrong"], report["lost"], report["truncated"]) == (0, 0, 0), run.stderr
    assert report["leaked"] == {"claims": 0, "slots": 0, "blocks": 0, "connections": 0}
    assert run.returncode == 0
