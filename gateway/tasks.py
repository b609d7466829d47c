"""A task group whose failure keeps nothing alive, and tasks that run beside others."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from types import TracebackType
from typing import Any


class Tasks(asyncio.TaskGroup):
    """In Python 3.11 the exception of a group that failed, and the frame that raised it, hold each other, and with them all that the frames
    of its tasks knew (a request, with its body) until a collector of cycles comes by. Here those frames, which are over, are emptied."""

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            _empty(group)
            raise
        finally:
            del error, trace


@contextmanager
def beside(group: asyncio.TaskGroup, after_s: float, make: Callable[[], Iterable[Coroutine[Any, Any, None]]]) -> Iterator[None]:
    """These run in the group beside what is done in here, from so many seconds on: what is over sooner costs no tasks."""
    running: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(after_s, lambda: running.extend(group.create_task(one) for one in make()))
    try:
        yield
    finally:
        timer.cancel()
        for task in running:
            task.cancel()


def _empty(group: BaseExceptionGroup[BaseException]) -> None:
    clear_frames(group.__traceback__)
    if group.__context__ is not None:
        clear_frames(group.__context__.__traceback__)
    for error in group.exceptions:
        clear_frames(error.__traceback__)
        if isinstance(error, BaseExceptionGroup):
            _empty(error)
