"""Supervision, with real processes: health, death, order of stopping, and nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.process import NotHealthy, ProcessDied, Program, describe_exit, supervise, tail

STOP_TIMEOUT_S = 5.0


def python(name: str, code: str, rank: int = 0, **environment: str) -> Program:
    return Program(name, (sys.executable, "-S", "-c", textwrap.dedent(code)), rank, environment)


SLEEPER = "import time; print('up', flush=True); time.sleep(600)"

STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('up', flush=True)
    time.sleep(600)
"""

# Starts a child that ignores SIGTERM, says its pid, and sleeps.
PARENT = """
    import subprocess, sys, time
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(600)
"""

RECORDS_ITS_STOP = """
    import os, signal, sys, time
    def stop(*_):
        with open(os.environ["STOPS"], "a") as file:
            file.write(os.environ["NAME"] + "\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print('up', flush=True)
    time.sleep(600)
"""


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


async def said(log: Path, count: int = 1) -> list[str]:
    """The first lines of a log, once they are there."""
    async with asyncio.timeout(20):
        while len(lines := log.read_text().split()) < count:
            await asyncio.sleep(0.02)
    return lines


async def test_children_run_in_groups_of_their_own_and_stop_at_the_end(tmp_path: Path) -> None:
    async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
        child = await supervisor.start(python("sleeper", SLEEPER))
        assert await said(child.log) == ["up"]
        assert os.getpgid(child.process.pid) == child.process.pid != os.getpgrp()
    assert child.process.returncode == -signal.SIGTERM
    assert not running(child.process.pid)


async def test_the_environment_of_a_program_is_added_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "from-us")
    code = "import os, time; print(os.environ['INHERITED'], os.environ['ADDED'], flush=True); time.sleep(600)"
    async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
        child = await supervisor.start(python("environment", code, ADDED="by-program"))
        assert await said(child.log, 2) == ["from-us", "by-program"]


async def test_higher_ranks_stop_before_lower_ones(tmp_path: Path) -> None:
    stops = tmp_path / "stops"
    async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
        for name, rank in (("store", 0), ("gateway", 2), ("engine", 1)):
            child = await supervisor.start(python(name, RECORDS_ITS_STOP, rank, STOPS=str(stops), NAME=name))
            await said(child.log)
    assert stops.read_text().split() == ["gateway", "engine", "store"]


async def test_a_child_that_ignores_sigterm_is_killed_after_the_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with supervise(tmp_path, 0.2) as supervisor:
        child = await supervisor.start(python("stubborn", STUBBORN))
        await said(child.log)
    assert child.process.returncode == -signal.SIGKILL
    assert "stubborn did not stop" in capsys.readouterr().out


async def test_what_a_child_started_itself_is_gone_too(tmp_path: Path) -> None:
    async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
        child = await supervisor.start(python("parent", PARENT))
        [grandchild] = await said(child.log)
        assert running(int(grandchild))
    wait_until(lambda: not running(int(grandchild)))


async def test_a_child_that_dies_ends_everything_and_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
            other = await supervisor.start(python("other", SLEEPER))
            await supervisor.start(python("mortal", "import sys; print('the reason why'); sys.exit(7)"))
            await asyncio.Event().wait()
    [death] = caught.value.exceptions
    assert isinstance(death, ProcessDied)
    assert "mortal ended by itself (exit status 7)" in str(death)
    assert "the reason why" in str(death)
    assert not running(other.process.pid)


async def test_waiting_for_health_polls_until_the_probe_agrees(tmp_path: Path) -> None:
    answers = iter([False, False, True])

    async def probe() -> bool:
        return next(answers)

    async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
        child = await supervisor.start(python("slow", SLEEPER))
        assert await supervisor.wait_healthy(child, probe, timeout_s=20) >= 0
    assert next(answers, None) is None


async def test_health_has_a_deadline(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
            child = await supervisor.start(python("ill", SLEEPER))
            await said(child.log)
            await supervisor.wait_healthy(child, never, timeout_s=0.05)
    [failure] = caught.value.exceptions
    assert isinstance(failure, NotHealthy)
    assert "ill is not healthy" in str(failure)
    assert "| up" in str(failure)
    assert not running(child.process.pid)


async def test_the_death_of_a_child_is_not_waited_for_until_the_health_deadline(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(tmp_path, STOP_TIMEOUT_S) as supervisor:
            child = await supervisor.start(python("stillborn", "import sys; sys.exit(3)"))
            await supervisor.wait_healthy(child, never, timeout_s=600)
    assert isinstance(caught.value.exceptions[0], ProcessDied)


SUPERVISED = """
    import asyncio, sys
    from pathlib import Path
    from deploy.process import Program, supervise

    async def main() -> None:
        async with supervise(Path(sys.argv[1]), 5.0) as supervisor:
            child = await supervisor.start(Program("parent", (sys.executable, "-S", "-c", sys.argv[2])))
            print(child.process.pid, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISED), str(tmp_path), textwrap.dedent(PARENT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        log = tmp_path / "parent.log"
        wait_until(lambda: log.read_text().endswith("\n"))
        grandchild = int(log.read_text())
        try:
            assert running(child)
            assert running(grandchild)
            launcher.kill()
            wait_until(lambda: not running(child))
            wait_until(lambda: not running(grandchild))
        finally:
            for pid in (child, grandchild):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert tail(log, lines=2).splitlines()[1:] == ["  | two", "  | � three"]
    assert "cannot be read" in tail(tmp_path / "absent.log")


@pytest.mark.parametrize(("code", "words"), [(3, "exit status 3"), (-9, "killed by SIGKILL"), (-250, "killed by signal 250")])
def test_exit_statuses_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
