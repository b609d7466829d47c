"""What is told in passing, in both kinds of store."""

import asyncio

import pytest

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore, StoreError


async def test_who_listens_hears_everything_in_order_and_nothing_of_before(store: InstanceStore) -> None:
    await store.news.tell("too early")
    async with store.news.listen() as first, store.news.listen() as second:
        for number in range(50):
            await store.news.tell(f'{{"number": {number}, "text": "\\n漢"}}')
        async with asyncio.timeout(5):
            for hearing in (first, second):
                assert [await hearing.next() for _ in range(50)] == [f'{{"number": {number}, "text": "\\n漢"}}' for number in range(50)]
    await store.news.tell("too late")


async def test_who_waits_is_woken(store: InstanceStore) -> None:
    async with store.news.listen() as hearing, asyncio.TaskGroup() as group:
        waiting = group.create_task(hearing.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        await store.news.tell("now")
    assert waiting.result() == "now"


async def test_no_redis_is_a_store_error() -> None:
    gone = RedisStore("redis://127.0.0.1:1/0", timeout_s=0.2)
    with pytest.raises(StoreError):
        await gone.news.tell("x")
    with pytest.raises(StoreError):
        async with gone.news.listen():
            pass
    await gone.close()


async def test_one_who_does_not_take_it_loses_the_oldest() -> None:
    news = MemoryStore(asyncio.get_running_loop().time).news
    async with news.listen() as hearing:
        for number in range(10_001):
            await news.tell(str(number))
        assert await hearing.next() == "1"
