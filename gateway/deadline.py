"""A deadline that costs nothing where there is nothing to wait for."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def within(timeout_s: float | None, doing: Coroutine[Any, Any, T]) -> T:
    """What comes of it. Raises TimeoutError if it takes longer. A timer is set only once it waits: most writes and reads never do."""
    try:
        step = doing.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # it is what the coroutine returns
    async with asyncio.timeout(timeout_s):
        return await _rest_of(doing, step)


def expire(timeout: asyncio.Timeout) -> None:
    """Let it expire now."""
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


@types.coroutine
def _rest_of(doing: Coroutine[Any, Any, T], step: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that waits for `step`: what `await` does, from the middle on."""
    try:
        while True:
            try:
                sent = yield step
            except GeneratorExit:
                doing.close()
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is thrown where it belongs
                step = doing.throw(error)
            else:
                step = doing.send(sent)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
