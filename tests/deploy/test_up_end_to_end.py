"""`midstream up --engine fake`, as a user runs it: an answer through the gateway, then Ctrl-C, and nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from deploy.health import free_ports

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 50.0
pytestmark = pytest.mark.timeout(120)


@dataclass
class Launcher:
    """A running `midstream up` and what it has printed."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_ready(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not any("Midstream is ready" in line for line in self.lines):
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    def descendants(self) -> set[int]:
        """Processes under it, of any generation."""
        found, front = set[int](), {self.process.pid}
        while front:
            front = {child for parent in front for child in children(parent)} - found
            found |= front
        return found


def children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(stat.parent.name))
    return found


def wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while alive := {pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()}:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    [port] = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "deploy.cli", "up", "--engine", "fake", "--instances", "2", "--port", str(port)]
    environment = {**os.environ, "MIDSTREAM_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        up = Launcher(process, f"http://127.0.0.1:{port}")
        reader = threading.Thread(target=up.read)
        reader.start()
        try:
            yield up
        finally:
            process.kill()
            reader.join(TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_a_signal_stops_everything(launcher: Launcher, number: signal.Signals) -> None:
    launcher.wait_ready()
    with httpx.Client(base_url=launcher.url, timeout=TIMEOUT_S, trust_env=False) as client:
        assert len(client.get("/admin/instances").json()["instances"]) == 2
        body = {"model": "fake", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    processes = launcher.descendants()
    assert len(processes) >= 4
    launcher.process.send_signal(number)
    assert launcher.process.wait(TIMEOUT_S) == 0, "".join(launcher.lines)
    wait_gone(processes)


def test_nothing_survives_when_it_is_killed(launcher: Launcher) -> None:
    launcher.wait_ready()
    processes = launcher.descendants()
    launcher.process.kill()
    wait_gone(processes)


def test_the_death_of_an_engine_is_reported_and_ends_it(launcher: Launcher, tmp_path: Path) -> None:
    launcher.wait_ready()
    processes = launcher.descendants()
    [engine] = [p for p in processes if b"i1" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")]
    os.kill(engine, signal.SIGKILL)
    assert launcher.process.wait(TIMEOUT_S) == 1
    wait_gone(processes)
    assert "backend-1 ended by itself (killed by SIGKILL)" in "".join(launcher.lines)
    assert list(tmp_path.glob("logs/*/backend-1.log"))
