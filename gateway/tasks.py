"""A task group whose failure keeps nothing alive."""

import asyncio
from traceback import clear_frames
from types import TracebackType


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


def _empty(group: BaseExceptionGroup[BaseException]) -> None:
    clear_frames(group.__traceback__)
    if group.__context__ is not None:
        clear_frames(group.__context__.__traceback__)
    for error in group.exceptions:
        clear_frames(error.__traceback__)
        if isinstance(error, BaseExceptionGroup):
            _empty(error)
