"""A request that is on the move, and the moments of it at which something may be made to happen."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.answers import Answer
from tests.e2e.fleet import REACHED_WITHIN_S, Backend, Fleet, until


class Missed(Exception):
    """The move or the answer was over before anyone saw the moment: the machine has too much else to do."""


def repeated_if_missed(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that missed has shown nothing: it is made again, with the `stage` mended, at most twice. What always misses fails."""

    @functools.wraps(test)
    async def repeated(**arguments: Any) -> None:
        for last in (False, False, True):
            try:
                return await test(**arguments)
            except BaseExceptionGroup as group:
                if last or group.split(Missed)[1] is not None:
                    raise
            await arguments["stage"].fleet.mend()

    return repeated


@dataclass(eq=False)
class Scene:
    """One request, its client and the order to move it."""

    fleet: Fleet
    answer: Answer
    source: Backend
    destination: Backend
    reading: "asyncio.Task[None]"
    ordering: "asyncio.Task[dict[str, Any]] | None" = None

    async def copying(self) -> None:
        """Memory is held at the destination, blocks are under way, and the source decodes on."""
        await self._until(self._is_arriving)
        seen = (await self.source.find(self.answer.request))["output_tokens"]

        async def decodes_on() -> bool:
            row = await self.source.find(self.answer.request)
            return bool(row["state"] == "moving" and row["output_tokens"] >= seen + 2)

        await self._until(decodes_on)

    async def frozen(self) -> None:
        """The request is out of its batch, and its blocks are under way."""

        async def is_frozen() -> bool:
            arriving, load = await asyncio.gather(self._is_arriving(), self.source.load())
            return bool(arriving and load["running"] == 0)

        await self._until(is_frozen)

    async def committed(self) -> None:
        """The destination is the owner."""
        with missed_if_over(self.reading):
            await until(self._is_owned_there, REACHED_WITHIN_S)

    async def outcome(self) -> dict[str, Any]:
        """What came of the order."""
        assert self.ordering is not None
        async with asyncio.timeout(REACHED_WITHIN_S):
            return await self.ordering

    async def _is_arriving(self) -> bool:
        request = self.answer.request
        here, there, load = await asyncio.gather(self.source.find(request), self.destination.find(request), self.destination.load())
        arriving = here.get("state") == "moving" and there.get("state") == "arriving"
        return bool(arriving and load["free_tokens"] < self.destination.free_tokens)

    async def is_resumed(self) -> bool:
        """The request goes on at the other instance."""
        row = await self.destination.find(self.answer.request)
        return row.get("state") == "decoding" and int(row["epoch"]) >= 1000

    async def _is_owned_there(self) -> bool:
        return (await self.destination.find(self.answer.request)).get("state") in ("decoding", "waiting")

    async def _until(self, moment: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a moment within the move."""

        async def is_now() -> bool:
            if self.ordering is not None and self.ordering.done():
                raise Missed(self.ordering.result())
            return await moment()

        with missed_if_over(self.reading):
            await until(is_now, REACHED_WITHIN_S)


@contextmanager
def missed_if_over(reading: "asyncio.Task[None]") -> Iterator[None]:
    """What is waited for within an answer cannot come any more once the answer is over."""
    try:
        yield
    except TimeoutError:
        if reading.done():
            raise Missed("the answer was over before that was seen") from None
        raise


@asynccontextmanager
async def running(fleet: Fleet, path: str, body: Mapping[str, Any], output_tokens: int = 10) -> AsyncIterator[Scene]:
    """A request that has that many tokens; on leaving, its client has got all it will ever get."""
    async with asyncio.TaskGroup() as group:
        answer = Answer(fleet.next_request())
        reading = group.create_task(fleet.read(answer, path, body))
        with missed_if_over(reading):
            source = await fleet.locate(answer.request, output_tokens)
        yield Scene(fleet, answer, source, fleet.other(source), reading)


@asynccontextmanager
async def moving(fleet: Fleet, path: str, body: Mapping[str, Any], mode: str = "live", output_tokens: int = 10) -> AsyncIterator[Scene]:
    """The same, with the order given to move it to the other instance."""
    async with running(fleet, path, body, output_tokens) as scene, asyncio.TaskGroup() as group:
        scene.ordering = group.create_task(fleet.move(scene.answer.request, scene.destination.id, mode))
        yield scene
