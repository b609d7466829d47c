"""What a process and all its descendants have cost so far.

CPU is read from each process's own clock, in nanoseconds. The ticks in /proc/PID/stat are ten milliseconds each, and charge whoever runs
when one comes: too coarse for a few hundred requests.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class TreeCost:
    """CPU seconds (user and system, of every thread, and of children that have ended) and resident bytes."""

    cpu_s: float
    resident_bytes: int
    processes: int


def tree_cost(root: int) -> TreeCost:
    """The cost of the tree under that process. A process that ends meanwhile counts for nothing."""
    cpu_s, resident, count = 0.0, 0, 0
    for pid in tree(root):
        try:
            own_s, fields = time.clock_gettime(_clock_of(pid)), _stat(pid)
            pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
        cpu_s += own_s + sum(int(fields[at]) for at in (13, 14)) * _TICK_S
        resident += pages * os.sysconf("SC_PAGE_SIZE")
        count += 1
    return TreeCost(cpu_s, resident, count)


def tree(root: int) -> Iterator[int]:
    """The process and its descendants."""
    yield root
    try:
        tasks = list((_PROC / str(root) / "task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def _clock_of(pid: int) -> int:
    """What clock_getcpuclockid(3) answers: the clock of all threads of a process, those that have ended included."""
    return (~pid << 3) | 2


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: [13] and [14] are the ticks of children that have ended."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
