"""What a process uses, as the kernel sees it (Linux)."""

from dataclasses import dataclass
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory in KiB of its own (private, resident) and open file descriptors."""

    memory_kib: float
    descriptors: int


def usage_of(pid: int) -> Usage:
    """Raises OSError if there is no such process."""
    proc = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    private = sum(float(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return Usage(private, sum(1 for _ in (proc / "fd").iterdir()))
