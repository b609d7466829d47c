"""Records, of both kinds of store: compare-and-set, and an end to each."""

import asyncio

from redis import Redis

from backend.registry.memory import MemoryStore
from backend.registry.record import Record
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore


async def test_written_and_read(store: InstanceStore) -> None:
    records = store.records
    assert await records.read("operation", "x") is None
    assert await records.write("operation", "x", '{"state": "ü"}', version=0, ttl_s=60)
    assert await records.read("operation", "x") == Record(1, '{"state": "ü"}')
    assert await records.write("operation", "x", "two", version=1, ttl_s=60)
    assert await records.write("operation", "y", "one", version=0, ttl_s=60)
    assert await records.write("other", "z", "one", version=0, ttl_s=60)
    assert await records.read_all("operation") == {"x": Record(2, "two"), "y": Record(1, "one")}


async def test_whoever_is_late_reads_again(store: InstanceStore) -> None:
    records = store.records
    assert await records.write("operation", "x", "one", version=0, ttl_s=60)
    assert not await records.write("operation", "x", "mine", version=0, ttl_s=60)
    assert not await records.write("operation", "x", "mine", version=7, ttl_s=60)
    assert await records.read("operation", "x") == Record(1, "one")
    answers = await asyncio.gather(*(records.write("operation", "x", f"by {number}", version=1, ttl_s=60) for number in range(8)))
    assert sum(answers) == 1


async def test_deleted(store: InstanceStore) -> None:
    assert await store.records.write("operation", "x", "one", version=0, ttl_s=60)
    assert await store.records.delete("operation", "x")
    assert not await store.records.delete("operation", "x")
    assert await store.records.read("operation", "x") is None
    assert await store.records.read_all("operation") == {}
    assert await store.records.write("operation", "x", "anew", version=0, ttl_s=60)


async def test_it_runs_out_in_memory() -> None:
    now_s = 10.0
    store = MemoryStore(lambda: now_s)
    assert await store.records.write("operation", "x", "one", version=0, ttl_s=2)
    now_s = 12.0
    assert await store.records.read("operation", "x") is None
    assert await store.records.read_all("operation") == {}


async def test_a_new_version_outlives_the_old_ones_end() -> None:
    now_s = 10.0
    records = MemoryStore(lambda: now_s).records
    assert await records.write("operation", "x", "one", version=0, ttl_s=2)
    assert await records.write("operation", "x", "two", version=1, ttl_s=5)
    assert await records.write("operation", "y", "one", version=0, ttl_s=1)
    now_s = 13.0
    assert await records.read_all("operation") == {"x": Record(2, "two")}
    now_s = 15.0
    assert await records.read_all("operation") == {}


async def test_names_of_what_ran_out_are_not_kept_in_redis(redis_store: RedisStore, redis_url: str) -> None:
    """Though nobody ever reads all of them: it is who writes that clears up, and the last name goes by itself."""
    with Redis.from_url(redis_url) as raw:
        for number in range(20):
            assert await redis_store.records.write("response", f"r{number}", "x", version=0, ttl_s=0.05)
        async with asyncio.timeout(5):
            while raw.exists("midstream:record:response:r19"):
                await asyncio.sleep(0.01)
        assert await redis_store.records.write("response", "last", "x", version=0, ttl_s=60)
        assert raw.zrange("midstream:records:response", 0, -1) == [b"last"]
        assert await redis_store.records.write("brief", "only", "x", version=0, ttl_s=0.05)
        async with asyncio.timeout(5):
            while raw.exists("midstream:records:brief"):
                await asyncio.sleep(0.01)


async def test_a_shorter_life_takes_no_name_of_a_longer_one(redis_store: RedisStore, redis_url: str) -> None:
    assert await redis_store.records.write("operation", "long", "x", version=0, ttl_s=60)
    assert await redis_store.records.write("operation", "short", "x", version=0, ttl_s=1)
    with Redis.from_url(redis_url) as raw:
        assert raw.pttl("midstream:records:operation") > 50_000


async def test_it_runs_out_in_redis(redis_store: RedisStore) -> None:
    assert await redis_store.records.write("operation", "x", "one", version=0, ttl_s=0.05)
    async with asyncio.timeout(5):
        while await redis_store.records.read_all("operation") or await redis_store.records.read("operation", "x"):
            await asyncio.sleep(0.01)
