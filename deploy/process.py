"""Supervision of child processes: start, wait for health, notice deaths, stop in order. Nothing outlives the supervisor.

Three nets: on the way out every child is stopped (SIGTERM, a deadline, SIGKILL for its whole process group); if this process is
killed, the kernel tells each child (PR_SET_PDEATHSIG); and a watchdog ends what those children started themselves.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.health import Probe
from deploy.settings import child_environment

PR_SET_PDEATHSIG = 1
TAIL_LINES = 25
PROGRESS_EVERY_S = 10.0
POLL_EVERY_S = 0.1


class ProcessDied(Exception):
    """A child ended though nobody asked it to. The message holds the end of its log."""


class NotHealthy(Exception):
    """A child did not become healthy within its deadline."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. Programs of a higher `rank` stop earlier; those of one rank stop together. Without a `vital` one nothing goes on."""

    name: str
    command: tuple[str, ...]
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    vital: bool = True


@dataclass(eq=False, slots=True)
class Child:
    """A running program."""

    program: Program
    process: asyncio.subprocess.Process
    log: Path
    stopping: bool = False


class Supervisor:
    """Owns child processes. Made by `supervise`."""

    def __init__(self, logs: Path, stop_timeout_s: float, watchers: asyncio.TaskGroup, watchdog: asyncio.StreamWriter) -> None:
        self._logs = logs
        self._stop_timeout_s = stop_timeout_s
        self._watchers = watchers
        self._watchdog = watchdog
        self._children: list[Child] = []

    async def start(self, program: Program) -> Child:
        """Start a program in a process group of its own, its output in a log file."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{program.name}.log"
        log.unlink(missing_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=child_environment(program.environment),
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        child = Child(program, process, log)
        self._children.append(child)
        self._watchdog.write(f"+{process.pid}\n".encode())
        self._watchers.create_task(self._watch(child), name=f"watch {program.name}")
        return child

    async def wait_healthy(self, child: Child, probe: Probe, timeout_s: float) -> float:
        """Return, with the seconds it took, once `probe` says yes; progress is printed. Raises NotHealthy.

        The death of any child meanwhile ends the whole supervision with ProcessDied.
        """
        started = time.monotonic()
        spoken = started
        try:
            async with asyncio.timeout(timeout_s):
                while not await probe():
                    if time.monotonic() - spoken >= PROGRESS_EVERY_S:
                        spoken = time.monotonic()
                        print(f"  waiting for {child.program.name} ({spoken - started:.0f} s; log: {child.log})", flush=True)
                    await asyncio.sleep(POLL_EVERY_S)
        except TimeoutError:
            raise NotHealthy(f"{child.program.name} is not healthy after {timeout_s:.0f} s.\n{tail(child.log)}") from None
        return time.monotonic() - started

    async def stop_all(self) -> None:
        """Stop every child: by falling rank, each rank at once."""
        for rank in sorted({child.program.rank for child in self._children}, reverse=True):
            async with asyncio.TaskGroup() as group:
                for child in tuple(self._children):
                    if child.program.rank == rank:
                        group.create_task(self._stop(child))

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        if child.stopping:
            return
        if not child.program.vital:
            print(f"  {child.program.name} ended by itself ({describe_exit(code)}; log: {child.log})", flush=True)
            self._end_group(child)
        else:
            raise ProcessDied(f"{child.program.name} ended by itself ({describe_exit(code)}).\n{tail(child.log)}")

    def stop_soon(self, child: Child, timeout_s: float) -> None:
        """Stop one child, in `timeout_s` at most; does not wait for it. Nothing if it is being stopped."""
        if not child.stopping:
            child.stopping = True
            self._watchers.create_task(self._stop(child, timeout_s), name=f"stop {child.program.name}")

    async def _stop(self, child: Child, timeout_s: float | None = None) -> None:
        child.stopping = True
        allowed_s = self._stop_timeout_s if timeout_s is None else timeout_s
        try:
            if child.process.returncode is None:
                child.process.terminate()
                async with asyncio.timeout(allowed_s):
                    await child.process.wait()
        except TimeoutError:
            print(f"  {child.program.name} did not stop within {allowed_s:.0f} s: killed", flush=True)
        finally:
            self._end_group(child)
        await child.process.wait()

    def _end_group(self, child: Child) -> None:
        """Whatever is left of the group: the child itself, or what it started. Once: the number may be another's later."""
        if child in self._children:
            self._children.remove(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            self._watchdog.write(f"-{child.process.pid}\n".encode())


@asynccontextmanager
async def supervise(logs: Path, stop_timeout_s: float) -> AsyncIterator[Supervisor]:
    """Run children inside this context; on leaving they are all stopped. Raises ExceptionGroup of ProcessDied if one dies."""
    watchdog = await start_watchdog()
    pipe = watchdog.stdin
    assert pipe is not None
    try:
        async with asyncio.TaskGroup() as watchers:
            supervisor = Supervisor(logs, stop_timeout_s, watchers, pipe)
            try:
                yield supervisor
            finally:
                await supervisor.stop_all()
    finally:
        pipe.close()
        await watchdog.wait()


async def start_watchdog() -> asyncio.subprocess.Process:
    """A process in a session of its own that outlives this one just long enough to end the process groups it was told of."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-S", str(Path(__file__).with_name("watchdog.py")), stdin=asyncio.subprocess.PIPE, start_new_session=True
    )


def die_with_parent() -> Callable[[], None]:
    """For the child, between fork and exec: ask the kernel for SIGTERM when the parent dies (Linux; elsewhere the watchdog alone)."""
    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def ask() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log file, indented, under its path."""
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The end of {log}:", *(f"  | {line}" for line in text)])
    return f"({log} cannot be read)"


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
