"""Token buckets, of both kinds of store; the arithmetic of time in memory, where a test owns the clock."""

import asyncio

import pytest
from redis import Redis

from backend.registry.memory import MemoryStore
from backend.registry.rates import Charge, MemoryRates, Rate
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore

SLOW = Rate(per_s=0.01, burst=3.0)
"""Gives nothing back while a test runs."""


def of(amount: float, bucket: str = "b", rate: Rate = SLOW) -> Charge:
    return Charge(bucket, amount, rate)


async def test_a_full_bucket_gives_what_it_holds_and_then_says_when_to_come_back(store: InstanceStore) -> None:
    assert [await store.rates.take([of(1)]) for _ in range(3)] == [0, 0, 0]
    assert await store.rates.take([of(1)]) == pytest.approx(100, abs=1)
    assert await store.rates.take([of(2)]) == pytest.approx(200, abs=1)
    assert await store.rates.take([of(1, "other")]) == 0


async def test_all_or_nothing(store: InstanceStore) -> None:
    assert await store.rates.take([of(3, "empty")]) == 0
    assert await store.rates.take([of(1, "full"), of(1, "empty")]) > 0
    assert await store.rates.take([of(3, "full")]) == 0, "nothing was taken of it"
    assert await store.rates.take([]) == 0


async def test_more_than_a_bucket_holds_is_owed(store: InstanceStore) -> None:
    assert await store.rates.take([of(5)]) == 0
    assert await store.rates.take([of(1)]) == pytest.approx(300, abs=1)


async def test_corrections_both_ways(store: InstanceStore) -> None:
    assert await store.rates.take([of(3)]) == 0
    await store.rates.correct([of(-2)])
    assert await store.rates.take([of(2)]) == 0
    await store.rates.correct([of(1)])
    assert await store.rates.take([of(1)]) == pytest.approx(200, abs=1)
    await store.rates.correct([of(-1000)])
    assert await store.rates.take([of(3)]) == 0
    assert await store.rates.take([of(1)]) > 0, "it holds no more than it can"


async def test_a_bucket_fills_again(store: InstanceStore) -> None:
    quick = Rate(per_s=20.0, burst=1.0)
    assert await store.rates.take([of(1, rate=quick)]) == 0
    async with asyncio.timeout(5):
        while (wait_s := await store.rates.take([of(1, rate=quick)])) > 0:
            assert wait_s <= 0.05
            await asyncio.sleep(wait_s)


async def test_of_many_who_ask_at_once_as_many_get_it_as_there_is(store: InstanceStore) -> None:
    waits = await asyncio.gather(*(store.rates.take([of(1)]) for _ in range(20)))
    assert waits.count(0) == 3


async def test_two_clients_share_a_bucket_and_nothing_is_left_of_full_ones(redis_url: str, redis_store: RedisStore) -> None:
    quick = Rate(per_s=100.0, burst=3.0)
    other = RedisStore(redis_url)
    assert await redis_store.rates.take([of(3)]) == 0
    assert await other.rates.take([of(1)]) > 0
    assert await other.rates.take([of(3, "quick", quick)]) == 0
    await other.close()
    with Redis.from_url(redis_url) as client:
        async with asyncio.timeout(5):
            while client.exists("midstream:rate:quick"):
                await asyncio.sleep(0.005)
        assert client.exists("midstream:rate:b")
        assert 0 < int(str(client.pttl("midstream:rate:b"))) <= 300_001


async def test_a_repeated_call_takes_nothing_twice(redis_store: RedisStore) -> None:
    rates = redis_store.rates
    assert await rates._use("call", 0, "b", "0.01", "3.0", "2.0") == "0"
    assert await rates._use("call", 0, "b", "0.01", "3.0", "2.0") == "0"
    assert await rates.take([of(1)]) == 0
    assert await rates.take([of(1)]) > 0


async def test_time_by_the_clock_and_no_memory_of_full_buckets() -> None:
    now_s = 0.0
    rates = MemoryRates(lambda: now_s)
    rate = Rate(per_s=2.0, burst=10.0)
    assert rates.take_now([of(10, rate=rate)]) == 0
    assert rates.take_now([of(4, rate=rate)]) == 2.0
    now_s = 2.0
    assert rates.take_now([of(4, rate=rate)]) == 0
    now_s = 1000.0
    assert rates.take_now([of(1, "another", rate)]) == 0
    assert list(rates._levels) == ["another"]


async def test_every_store_has_them() -> None:
    assert isinstance(MemoryStore(lambda: 0.0).rates, MemoryRates)
