"""Our schedulers, slowed while a request runs that a test wants to move.

A tiny model gives a token in two milliseconds. On a busy machine the engine's process would be done with a whole answer while the
test's own process still reads its beginning, and the order to move would find nothing to move."""

import re
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from backend.engine.vllm.scheduler import MigratingAsyncScheduler, MigratingScheduler

PACE = re.compile(r"\bp(\d\d)-")
"""In the id of a request that is to be slow: milliseconds that are added to each step."""


def paced_id(pace_s: float, number: int) -> str:
    """An id, as long as any other, for a request whose steps take that much longer."""
    return f"p{round(pace_s * 1000):02d}-{number:05d}"


def pace(running: Iterable[Any]) -> None:
    """Sleep as long as the slowest of the running requests asks."""
    paces = [int(found[1]) for request in running if (found := PACE.search(request.request_id))]
    time.sleep(max(paces, default=0) / 1000)


class PacedScheduler(MigratingScheduler):
    """For synchronous scheduling."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        pace(self.running)
        return super().schedule(*args, **kwargs)


class PacedAsyncScheduler(MigratingAsyncScheduler):
    """For asynchronous scheduling."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        pace(self.running)
        return super().schedule(*args, **kwargs)
