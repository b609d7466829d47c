"""Streams kept for other gateways, in both kinds of store: one owner at a time, and an end to each."""

import asyncio

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore
from backend.registry.stream import Appended, KeptStream

STREAM = KeptStream("g1", 1, '{"body": "ü"}')


async def test_kept_and_read(store: InstanceStore) -> None:
    streams = store.streams
    assert await streams.read("r") is None
    assert await streams.begin("r", STREAM, 60)
    assert await streams.read("r") == STREAM
    assert await streams.append("r", "g1", 0, (), None, 60) is Appended.KEPT
    assert await streams.append("r", "g1", 0, (5, 6), 1700000000, 60) is Appended.KEPT
    assert await streams.append("r", "g1", 2, range(7, 3000), None, 60) is Appended.KEPT
    kept = await streams.read("r")
    assert kept == KeptStream("g1", 1, '{"body": "ü"}', 1700000000, tuple(range(5, 3000)))


async def test_a_call_that_is_repeated_changes_nothing_more(store: InstanceStore) -> None:
    streams = store.streams
    for _ in range(2):
        assert await streams.begin("r", STREAM, 60)
    for at, tokens in ((0, (5, 6)), (0, (5, 6)), (2, (7,)), (2, (7,))):
        assert await streams.append("r", "g1", at, tokens, None, 60) is Appended.KEPT
    assert [await streams.take("r", "g1", "g2", 60) for _ in range(2)] == [2, 2]
    assert await streams.read("r") == KeptStream("g2", 2, STREAM.request, None, (5, 6, 7))


async def test_tokens_that_were_taken_back(store: InstanceStore) -> None:
    assert await store.streams.begin("r", STREAM, 60)
    await store.streams.append("r", "g1", 0, (5, 6, 7), None, 60)
    await store.streams.append("r", "g1", 1, (8,), None, 60)
    kept = await store.streams.read("r")
    assert kept is not None
    assert kept.tokens == (5, 8)
    await store.streams.append("r", "g1", 0, (), None, 60)
    kept = await store.streams.read("r")
    assert kept is not None
    assert kept.tokens == ()


async def test_an_owner_that_is_none_any_more_changes_nothing(store: InstanceStore) -> None:
    streams = store.streams
    assert await streams.begin("r", STREAM, 60)
    assert not await streams.begin("r", KeptStream("g2", 1, "mine"), 60)
    answers = await asyncio.gather(*(streams.take("r", "g1", f"g{number}", 60) for number in range(2, 10)))
    assert sorted(answer or 0 for answer in answers) == [0] * 7 + [2]
    assert await streams.append("r", "g1", 0, (1,), None, 60) is Appended.TAKEN
    assert await streams.take("r", "g1", "g11", 60) is None
    kept = await streams.read("r")
    assert kept is not None
    assert (kept.term, kept.tokens) == (2, ())


async def test_of_what_is_lost_the_owner_hears(store: InstanceStore) -> None:
    assert await store.streams.append("r", "g1", 0, (1,), None, 60) is Appended.GONE
    assert await store.streams.begin("r", STREAM, 60)
    assert await store.streams.append("r", "g1", 3, (1,), None, 60) is Appended.GONE
    assert await store.streams.take("x", "g1", "g2", 60) is None


async def test_it_runs_out_in_memory() -> None:
    now_s = 10.0
    store = MemoryStore(lambda: now_s)
    assert await store.streams.begin("r", STREAM, 2)
    now_s = 11.0
    await store.streams.append("r", "g1", 0, (1,), None, 2)
    now_s = 12.5
    assert await store.streams.read("r") is not None
    now_s = 13.0
    assert await store.streams.read("r") is None


async def test_it_runs_out_in_redis(redis_store: RedisStore) -> None:
    assert await redis_store.streams.begin("r", STREAM, 60)
    assert await redis_store.streams.append("r", "g1", 0, (1,), None, 0.05) is Appended.KEPT
    async with asyncio.timeout(5):
        while await redis_store.streams.read("r"):
            await asyncio.sleep(0.01)
    assert await redis_store.streams.begin("r", KeptStream("g2", 1, "another"), 60)
    assert await redis_store.streams.read("r") == KeptStream("g2", 1, "another")
