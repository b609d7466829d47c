"""Tasks beside what a request does."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest

from gateway.tasks import Tasks, beside


async def test_what_is_over_sooner_has_nobody_beside_it() -> None:
    def make() -> Iterable[Coroutine[Any, Any, None]]:
        raise AssertionError

    async with Tasks() as tasks:
        with beside(tasks, 60.0, make):
            pass


async def test_they_run_until_it_is_over() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Tasks() as tasks:
        with beside(tasks, 0.0, lambda: [run()]):
            await started.wait()
            assert not ended.is_set()
    assert ended.is_set()


async def test_their_failure_ends_it() -> None:
    async def run() -> None:
        raise LookupError

    with pytest.raises(ExceptionGroup) as raised:
        async with Tasks() as tasks:
            with beside(tasks, 0.0, lambda: [run()]):
                await asyncio.Event().wait()
    assert isinstance(raised.value.exceptions[0], LookupError)
