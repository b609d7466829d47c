"""What this machine has to give to engines: GPUs, or else cores."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """GPU names as CUDA_VISIBLE_DEVICES takes them, and how many cores are usable."""

    gpus: tuple[str, ...]
    cores: int

    @staticmethod
    def look(visible_gpus: str | None, devices: Path = Path("/dev")) -> "Machine":
        """This machine, within the GPUs and cores that this process may use."""
        present = sorted(int(d.name.removeprefix("nvidia")) for d in devices.glob("nvidia[0-9]*") if d.name[6:].isdigit())
        allowed = [name.strip() for name in visible_gpus.split(",") if name.strip()] if visible_gpus is not None else None
        gpus = allowed if allowed is not None and present else [str(number) for number in range(len(present))]
        return Machine(tuple(gpus), len(os.sched_getaffinity(0)))

    def describe(self) -> str:
        """For people."""
        return f"{len(self.gpus)} GPU(s)" if self.gpus else f"the CPU ({self.cores} core(s), one thread for each engine)"
