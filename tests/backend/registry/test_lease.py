"""Leases, of both kinds of store: one holder, and tokens that only grow."""

import asyncio

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore


async def test_one_holder_at_a_time(store: InstanceStore) -> None:
    first = await store.leases.acquire("rebalance", "a", 60)
    assert first is not None
    assert await store.leases.acquire("rebalance", "b", 60) is None
    assert await store.leases.acquire("rebalance", "a", 60) == first, "its holder prolongs it"
    assert await store.leases.acquire("scale", "b", 60) is not None, "another name is another lease"


async def test_a_released_lease_is_free_and_its_token_old(store: InstanceStore) -> None:
    first = await store.leases.acquire("rebalance", "a", 60)
    assert first is not None
    assert await store.leases.release(first)
    assert not await store.leases.release(first)
    second = await store.leases.acquire("rebalance", "b", 60)
    assert second is not None
    assert second.token > first.token
    assert not await store.leases.release(first), "not the present grant"
    assert await store.leases.acquire("rebalance", "a", 60) is None


async def test_of_many_who_ask_at_once_one_gets_it(store: InstanceStore) -> None:
    answers = await asyncio.gather(*(store.leases.acquire("rebalance", f"g{number}", 60) for number in range(12)))
    assert sum(answer is not None for answer in answers) == 1


async def test_it_runs_out_in_memory() -> None:
    now_s = 10.0
    store = MemoryStore(lambda: now_s)
    first = await store.leases.acquire("rebalance", "a", 2)
    now_s = 12.0
    second = await store.leases.acquire("rebalance", "b", 2)
    assert first is not None
    assert second is not None
    assert second.token > first.token
    assert not await store.leases.release(first)


async def test_it_runs_out_in_redis(redis_store: RedisStore) -> None:
    first = await redis_store.leases.acquire("rebalance", "a", 0.05)
    async with asyncio.timeout(5):
        while (second := await redis_store.leases.acquire("rebalance", "b", 60)) is None:
            await asyncio.sleep(0.01)
    assert first is not None
    assert second.token > first.token


async def test_tokens_grow_even_if_redis_has_forgotten(redis_store: RedisStore) -> None:
    first = await redis_store.leases.acquire("rebalance", "a", 60)
    await redis_store._link._redis.flushall()
    await asyncio.sleep(0.002)  # the clock of the tokens ticks in milliseconds
    second = await redis_store.leases.acquire("rebalance", "b", 60)
    assert first is not None
    assert second is not None
    assert second.token > first.token
