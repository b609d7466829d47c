"""A deadline around what may or may not wait."""

import asyncio

import pytest

from gateway.deadline import within


async def waits(times: int, noted: list[str]) -> str:
    try:
        for _ in range(times):
            await asyncio.sleep(0)
        return "done"
    except asyncio.CancelledError:
        noted.append("cancelled")
        raise
    finally:
        noted.append("left")


async def fails(times: int) -> None:
    await waits(times, [])
    raise StopAsyncIteration


@pytest.mark.parametrize("times", [0, 1, 5])
async def test_what_comes_of_it_is_handed_on(times: int) -> None:
    noted: list[str] = []
    assert await within(60, waits(times, noted)) == "done"
    assert await within(None, waits(times, noted)) == "done"
    assert noted == ["left", "left"]


@pytest.mark.parametrize("times", [0, 1, 5])
async def test_a_fault_is_handed_on(times: int) -> None:
    with pytest.raises(StopAsyncIteration):
        await within(60, fails(times))


async def test_what_takes_too_long_is_cancelled() -> None:
    noted: list[str] = []
    with pytest.raises(TimeoutError):
        await within(0.001, waits(10**9, noted))
    assert noted == ["cancelled", "left"]


async def test_its_own_timeouts_and_tasks_work_inside() -> None:
    async def nested() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(60)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(waits(2, []))
        assert asyncio.current_task() is not None
        return len(task.result())

    assert await within(60, nested()) == 4


async def test_whoever_is_cancelled_cancels_it() -> None:
    noted: list[str] = []
    task = asyncio.ensure_future(within(60, waits(10**9, noted)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert noted == ["cancelled", "left"]


async def test_what_is_left_in_the_middle_is_closed() -> None:
    noted: list[str] = []
    doing = within(60, waits(3, noted))
    doing.send(None)
    doing.close()
    assert noted == ["left"]
