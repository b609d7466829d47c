"""Backends as processes: small ones that stand in for a backend, on their own or under a supervisor."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.launch.processes import Placed, ProcessLauncher
from deploy.launch.runner import DetachedRunner, Process, SupervisedRunner, born_ticks
from deploy.process import Program, supervise
from gateway.scaling.launcher import LauncherError, LaunchState
from migration.leg import InstanceId
from tests.deploy.launch.suite import A, B, Bench, LauncherSuite, bench_of

SLEEPER = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(1000)"
BROKEN = "import sys; print('out of memory'); sys.exit(3)"


def program(place: int, instance: InstanceId, port: int, model: str | None) -> Program:
    code = {"broken": BROKEN, "stubborn": STUBBORN}.get(model or "", SLEEPER)
    return Program(f"backend-{instance}", (sys.executable, "-S", "-c", code, str(place), str(port)), 1, vital=False)


def launcher_of(runner: DetachedRunner | SupervisedRunner, folder: Path | None = None) -> ProcessLauncher:
    return ProcessLauncher(runner, program, host="127.0.0.1", default_model="m", folder=folder)


async def end_all(launcher: ProcessLauncher, runner: DetachedRunner) -> None:
    """However a test ended, nothing of it goes on running."""
    for placed in launcher.placed:
        if placed.process.runs:
            os.killpg(placed.process.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        while any(runner.how_it_ended(placed.process) is None for placed in launcher.placed):
            await asyncio.sleep(0.01)


class TestDetached(LauncherSuite):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[Bench]:
        runner = DetachedRunner(tmp_path / "logs", 5.0)
        launcher = launcher_of(runner, tmp_path / "launched")
        async with bench_of(launcher) as bench:
            yield bench
        await end_all(launcher, runner)

    async def test_one_that_dies_is_known_with_its_last_words_until_it_is_told_to_stop(self, bench: Bench) -> None:
        await bench.launcher.launch(A, "broken", 1)
        known = await bench.wait(lambda known: known[A].state is LaunchState.EXITED)
        assert "exit status 3" in known[A].detail
        assert "out of memory" in known[A].detail
        assert known[A].model == "broken"
        await bench.launcher.stop(A, 1)
        assert await bench.known() == {}


class TestSupervised(LauncherSuite):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[Bench]:
        async with (
            supervise(tmp_path / "logs", 5.0) as supervisor,
            bench_of(launcher_of(SupervisedRunner(supervisor, 5.0))) as bench,
        ):
            yield bench

    async def test_the_death_of_one_is_no_end_of_all(self, bench: Bench) -> None:
        await bench.launcher.launch(A, "broken", 1)
        await bench.launcher.launch(B, None, 1)
        known = await bench.wait(lambda known: known[A].state is LaunchState.EXITED)
        assert known[B].state is LaunchState.RUNNING


async def test_the_next_launcher_knows_what_the_last_one_left_running(tmp_path: Path) -> None:
    runner, folder = DetachedRunner(tmp_path / "logs", 5.0), tmp_path / "launched"
    first = launcher_of(runner, folder)
    for key in (A, B):
        await first.launch(key, None)
    try:
        os.killpg(next(placed for placed in first.placed if placed.instance == B).process.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while runner.how_it_ended(first.placed[1].process) is None:
                await asyncio.sleep(0.01)
        (folder / "torn.json").write_text('{"instance": "tor')
        second = launcher_of(runner, folder)
        assert second.adopt_noted() == (A,)
        assert await second.launch(A, None) == A
        (known,) = await second.list()
        assert (known.instance, known.order, known.model) == (A, 1, "m")
        assert await second.launch(B, None) == B
        await second.stop(A)
        async with asyncio.timeout(5):
            while A in {each.instance for each in await second.list()}:
                await asyncio.sleep(0.01)
        third = launcher_of(runner, folder)
        assert third.adopt_noted() == (B,)
    finally:
        await end_all(second, runner)


async def test_a_number_used_again_is_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "launched"
    runner = DetachedRunner(tmp_path / "logs", 5.0)
    mine = born_ticks(os.getpid())
    assert mine is not None
    launcher_of(runner, folder).adopt(Placed(A, "m", 0, 1, Process(os.getpid(), mine - 1, "")))
    assert launcher_of(runner, folder).adopt_noted() == ()
    assert not list(folder.glob("*.json"))


async def test_places_and_ports_are_shared_out(tmp_path: Path) -> None:
    runner = DetachedRunner(tmp_path / "logs", 5.0)
    launcher = launcher_of(runner)
    try:
        for key in (A, B):
            await launcher.launch(key, None)
        await launcher.stop(A)
        async with asyncio.timeout(5):
            while A in {each.instance for each in await launcher.list()}:
                await asyncio.sleep(0.01)
        await launcher.launch(A, None)
        assert {placed.instance: (placed.place, placed.order) for placed in launcher.placed} == {B: (1, 2), A: (0, 3)}
    finally:
        await end_all(launcher, runner)


async def test_one_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    now_s = 0.0
    runner = DetachedRunner(tmp_path / "logs", 60.0, lambda: now_s)
    launcher = launcher_of(runner)
    await launcher.launch(A, "stubborn")
    try:
        async with asyncio.timeout(5):
            while "ready" not in Path(launcher.placed[0].process.log).read_text():
                await asyncio.sleep(0.01)
        await launcher.stop(A)
        now_s = 59.0
        await launcher.stop(A)
        (known,) = await launcher.list()
        assert known.state is LaunchState.STOPPING
        now_s = 61.0
        await launcher.stop(A)
        async with asyncio.timeout(5):
            while await launcher.list():
                await asyncio.sleep(0.01)
    finally:
        await end_all(launcher, runner)


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    launcher = ProcessLauncher(
        DetachedRunner(tmp_path, 5.0), lambda *_: Program("x", ("/no/such/program",), 1), host="127.0.0.1", default_model="m"
    )
    with pytest.raises(LauncherError):
        await launcher.launch(A, None)
    assert await launcher.list() == []
