"""Starts one program as a process, tells whether it runs, and stops it. Two ways: under a supervisor, or on its own.

Supervised processes end with their supervisor (`midstream up`). Detached ones outlive the launcher that started them, and are found
again by the next (`midstream launcher`).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.process import Child, Program, Supervisor, describe_exit, tail
from deploy.settings import child_environment

_STATE_FIELD, _START_TIME_FIELD = 0, 19
"""Of /proc/PID/stat, behind the command in parentheses: fields 3 and 22 of proc(5)."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; `born_ticks`, since boot, tells it from a later one with the same number."""

    pid: int
    born_ticks: int
    log: str

    @property
    def age_s(self) -> float:
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime_s - self.born_ticks / os.sysconf("SC_CLK_TCK"))

    @property
    def runs(self) -> bool:
        """Whether it is there, and has not ended."""
        return born_ticks(self.pid) == self.born_ticks


class Runner(Protocol):
    """See above."""

    async def start(self, program: Program) -> Process:
        """Raises OSError."""

    def stop(self, process: Process, *, told: bool) -> None:
        """SIGTERM, unless it was `told` before; and SIGKILL, for its whole group, if it has not ended in time and is asked again."""

    def how_it_ended(self, process: Process) -> str | None:
        """In words; None while it runs."""


class SupervisedRunner:
    """Through a supervisor."""

    def __init__(self, supervisor: Supervisor, kill_after_s: float) -> None:
        self._supervisor = supervisor
        self._kill_after_s = kill_after_s
        self._children: dict[int, Child] = {}

    def know(self, child: Child) -> Process:
        """A child that was started by somebody else."""
        pid = child.process.pid
        self._children[pid] = child
        return Process(pid, born_ticks(pid) or 0, str(child.log))

    async def start(self, program: Program) -> Process:
        return self.know(await self._supervisor.start(program))

    def stop(self, process: Process, *, told: bool) -> None:
        self._supervisor.stop_soon(self._children[process.pid], self._kill_after_s)

    def how_it_ended(self, process: Process) -> str | None:
        child = self._children[process.pid]
        if child.process.returncode is None:
            return None
        return f"{describe_exit(child.process.returncode)}\n{tail(child.log)}"


class DetachedRunner:
    """Each process in a session of its own. `clock` is monotonic, in seconds."""

    def __init__(self, logs: Path, kill_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._kill_after_s = kill_after_s
        self._clock = clock
        self._exits: dict[int, int] = {}
        self._told_s: dict[Process, float] = {}

    async def start(self, program: Program) -> Process:
        return self._spawn(program)

    def _spawn(self, program: Program) -> Process:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{program.name}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        pid = os.posix_spawn(
            program.command[0],
            program.command,
            child_environment(program.environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        return Process(pid, born_ticks(pid) or 0, str(log))

    def stop(self, process: Process, *, told: bool) -> None:
        if self.how_it_ended(process) is not None:
            return
        if process not in self._told_s:
            self._told_s[process] = self._clock()
            if not told:  # a second signal would cut its drain short
                os.kill(process.pid, signal.SIGTERM)
        elif self._clock() - self._told_s[process] > self._kill_after_s:
            _kill_group(process.pid)

    def how_it_ended(self, process: Process) -> str | None:
        self._reap(process.pid)
        if process.runs:
            return None
        if self._told_s.pop(process, None) is not None:
            _kill_group(process.pid)  # what it started and left behind
        code = self._exits.get(process.pid)
        how = describe_exit(code) if code is not None else "nobody saw how"
        return f"{how}\n{tail(Path(process.log))}"

    def _reap(self, pid: int) -> None:
        """Ours is told apart from an adopted one by the system: only ours can be waited for."""
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._exits[pid] = os.waitstatus_to_exitcode(status)


def born_ticks(pid: int) -> int | None:
    """When a process was started; None if it is not there, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STATE_FIELD] == "Z" else int(fields[_START_TIME_FIELD])


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
