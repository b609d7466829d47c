"""The bench of the relay: its backend and its client agree, its figures are what they say, and one tiny run goes through."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.lean_backend import Connection, script_of
from bench.lean_client import Load, run_requests, run_streams
from bench.process_tree import tree_cost
from bench.proxies import PeerMissing, find_proxy
from bench.relay import Plan, Tally, as_text, percentile, summary

STREAM = json.dumps({"stream": True, "max_tokens": 7, "model": "bench"}).encode()
PLAIN = json.dumps({"stream": False, "model": "bench"}).encode()


@asynccontextmanager
async def backend(rate: float = 1000.0) -> AsyncIterator[int]:
    script = script_of(rate, 50)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(script), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_every_event_of_every_stream_is_seen() -> None:
    async with backend() as port:
        load = await run_streams(port, STREAM, 5, 7, 10)
    assert (load.errors, load.requests, load.events) == ([], 5, 5 * 8)
    assert (len(load.ttft_s), len(load.gaps_s)) == (5, 5 * 6)
    assert all(gap >= 0 for gap in load.gaps_s)


async def test_a_stream_that_lacks_events_is_an_error() -> None:
    async with backend() as port:
        load = await run_streams(port, STREAM, 2, 9, 10)
    assert load.errors == ["8 events in place of 10"] * 2
    assert not load.gaps_s


async def test_plain_requests_are_counted_and_failures_too() -> None:
    async with backend() as port:
        load = await run_requests(port, PLAIN, 20, 4, 10)
        assert (load.errors, len(load.latency_s)) == ([], 20)
    refused = await run_requests(port, PLAIN, 3, 1, 10)
    assert len(refused.errors) == 1


def test_the_cost_of_a_tree_holds_its_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ntime.sleep(60)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        cost = tree_cost(process.pid)
        assert (cost.processes, cost.cpu_s >= 0.3, cost.resident_bytes > 5_000_000) == (2, True, True)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()
    assert tree_cost(process.pid).processes == 0


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (50.0, 99.0, 7.0)


def test_figures_are_over_direct() -> None:
    direct, ours = Tally(), Tally()
    direct.add(Load(ttft_s=[0.01], gaps_s=[0.02], events=100, requests=10, wall_s=1.0), 0.0, 0)
    ours.add(Load(ttft_s=[0.013], gaps_s=[0.021], events=100, requests=10, wall_s=1.0), 0.004, 1024 * 500)
    rows = summary({"streams 10": {"direct": direct, "midstream": ours}}, Plan((10,), 10, 50.0, 0, 1))["scenarios"]["streams 10"]
    assert rows["midstream"] == {
        "errors": 0,
        "first_error": None,
        "cpu_us_per_chunk": 40.0,
        "added_ttft_ms": {"p50": 3.0, "p99": 3.0},
        "added_gap_ms": {"p50": 1.0, "p99": 1.0},
        "kb_per_stream": 50.0,
    }
    assert rows["direct"]["cpu_us_per_chunk"] is None
    assert "midstream" in as_text({"scenarios": {"streams 10": rows}})


def test_a_peer_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"pip install '\.\[peers\]'"):
        find_proxy("smg", tmp_path)
    with pytest.raises(PeerMissing, match="known"):
        find_proxy("apache", tmp_path)


@pytest.mark.timeout(180)
def test_one_tiny_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "bench", "relay", "--json", "--ours", "midstream-cursors", "--rounds", "1"]
    small = ["--streams", "3", "--events", "5", "--requests", "8"]
    run = subprocess.run(
        [*command, *small], env={**os.environ, "MIDSTREAM_HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)["scenarios"]
    assert set(told) == {"streams 3", *(f"requests {size} x{many}" for size in ("1KB", "1MB") for many in (1, 32))}
    for rows in told.values():
        assert set(rows) == {"direct", "midstream-cursors"}
        assert all(row["errors"] == 0 for row in rows.values())
