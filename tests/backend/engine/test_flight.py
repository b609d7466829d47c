import asyncio

import pytest

from backend.engine.flight import Flight, Replay
from migration.leg import Leg, RequestId
from migration.messages import HttpRequest, TokenStep


@pytest.fixture
def flight() -> Flight:
    return Flight(Leg(RequestId("R"), 3), HttpRequest("/", (), b""))


def steps(*tokens: int) -> tuple[TokenStep, ...]:
    return tuple(TokenStep(token) for token in tokens)


async def test_a_replay_gives_each_token_once_and_ends_when_finished() -> None:
    replay = Replay()
    replay.extend(steps(1, 2))
    seen: list[tuple[TokenStep, ...]] = []

    async def read() -> None:
        async for batch in replay.batches():
            seen.append(batch)  # noqa: PERF401 - looked at while it grows

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        for _ in range(3):
            await asyncio.sleep(0)
        assert seen == [steps(1, 2)]
        replay.extend(steps(3))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not replay.finished
        assert not reading.done()
        replay.extend(steps(4, 5))
        replay.finish()
    assert replay.finished
    assert seen == [steps(1, 2), steps(3), steps(4, 5)]
    assert replay.steps == steps(1, 2, 3, 4, 5)


async def test_an_epoch_is_never_tried_twice(flight: Flight) -> None:
    assert [flight.next_leg().epoch for _ in range(3)] == [4, 5, 6]


async def test_everyone_who_waits_for_history_is_woken(flight: Flight) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(flight.wait_history(count)) for count in (1, 2, 2, 3)]
        await asyncio.sleep(0)
        flight.note_tokens(list(steps(1, 2)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, True, True, False]
        flight.note_yielded(1)
        flight.note_tokens(list(steps(3)))
    assert (len(flight.history), flight.yielded) == (3, 1)


async def test_the_end_of_a_flight_ends_every_wait(flight: Flight) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flight.wait_history(5))
        tasks.create_task(flight.wait_noted())
        await asyncio.sleep(0)
        flight.end()
    await flight.wait_history(5)
    assert flight.ended.is_set()


async def test_noted_tokens_are_told_once(flight: Flight) -> None:
    flight.note_tokens(list(steps(1)))
    await flight.wait_noted()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await flight.wait_noted()
