"""What a process and all its descendants have cost so far, read from /proc."""

import os
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
            fields = _stat(pid)
            pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
        cpu_s += sum(int(fields[at]) for at in (11, 12, 13, 14)) * _TICK_S
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


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: [11..14] are utime, stime, cutime, cstime."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
