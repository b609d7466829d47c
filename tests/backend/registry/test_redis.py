"""What only Redis can do wrong."""

import asyncio
import time
from dataclasses import replace

import pytest
from redis import Redis

from backend.registry.instance import LoadReport
from backend.registry.redis import RedisStore
from backend.registry.store import Candidate, Claim, StoreError
from migration.leg import InstanceId, Leg, RequestId


async def test_every_failure_is_a_store_error(report: LoadReport) -> None:
    store = RedisStore("redis://127.0.0.1:1", timeout_s=0.2)
    with pytest.raises(StoreError):
        await store.ping()
    with pytest.raises(StoreError):
        await store.publish(report, 1)
    with pytest.raises(StoreError):
        await store.sightings()
    with pytest.raises(StoreError):
        await store.record_switch(Leg(RequestId("r"), 0), 1.0, 1)
    await store.close()


async def test_silent_server_does_not_hold_anyone() -> None:
    """A server that accepts and never answers."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(-1)
        finally:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        store = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.1)
        started_s = time.monotonic()
        with pytest.raises(StoreError):
            await store.release(RequestId("r"))
        assert time.monotonic() - started_s < 2
        await store.close()


async def test_malformed_report_hides_no_other(redis_store: RedisStore, redis_url: str, report: LoadReport) -> None:
    await redis_store.publish(report, 60)
    await redis_store.publish(replace(report, instance=InstanceId("i2")), 60)
    with Redis.from_url(redis_url) as client:
        client.hset("midstream:reports", "i1", '{"version": 99}')
    assert [sighting.report.instance for sighting in await redis_store.sightings()] == ["i2"]


async def test_scripts_survive_a_flush_of_the_script_cache(redis_store: RedisStore, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.script_flush()
    assert not await redis_store.release(RequestId("r"))


async def test_broken_connections_are_replaced(redis_store: RedisStore, redis_url: str) -> None:
    await redis_store.ping()
    with Redis.from_url(redis_url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    await redis_store.ping()


async def test_nothing_is_left_when_all_is_released(redis_store: RedisStore, redis_url: str, report: LoadReport) -> None:
    await redis_store.publish(report, 60)
    for number in range(5):
        request = Claim(RequestId(f"r{number}"), InstanceId(""), "g", "normal", 3)
        await redis_store.claim(request, [Candidate(InstanceId("i1"), number)], 60)
    for number in range(5):
        assert await redis_store.release(RequestId(f"r{number}"))
    await redis_store.withdraw(report.instance)
    with Redis.from_url(redis_url) as client:
        assert client.keys("*") == []


async def test_many_at_once_share_few_connections(redis_store: RedisStore) -> None:
    assert not any(await asyncio.gather(*(redis_store.release(RequestId(f"r{n}")) for n in range(500))))
