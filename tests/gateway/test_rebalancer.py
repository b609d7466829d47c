"""Requests that move by themselves: gateways and backends of one process, over real HTTP."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from gateway.app import compose
from gateway.errors import UpstreamDeclined
from gateway.mover import order
from gateway.policy.config import MidstreamPolicy, Policy
from gateway.policy.tier import Tiers
from gateway.request_log import open_request_log
from gateway.settings import GatewaySettings
from gateway.term import Office
from gateway.upstream import Upstream
from migration.leg import InstanceId, RequestId
from migration.plan import Destination, MigrationPlan
from tests.backend.registry.conftest import redis_store, redis_url  # noqa: F401  # fixtures
from tests.gateway.conftest import until
from tests.gateway.fake_fleet import Fleet, Stream, fleet, gateway, metrics, site

SHORT, LONG, TOKENS = 600, 1000, 90
"""Two short prompts on each of two instances of 2,048 tokens leave 848 free on each: too few for the long one, enough together."""


def policy(**fields: object) -> Policy:
    return MidstreamPolicy(**{"interval_s": 0.05, **fields}).build(Tiers())  # type: ignore[arg-type]


async def moved(url: str, reason: str) -> int:
    return int((await metrics(url)).get(f'midstream_gateway_migrations_total{{outcome="moved",reason="{reason}"}}', 0))


async def until_moved(url: str, reason: str, least: int = 1) -> None:
    """The stream may go on a moment before the gateway that ordered the move has heard its outcome."""

    async def are_counted() -> bool:
        return await moved(url, reason) >= least

    await until(are_counted)


async def play(scene: Fleet, url: str) -> int:
    """The long prompt comes; answers how many short ones had ended when it started."""
    shorts = await scene.fill(url, SHORT, TOKENS)
    long = scene.ask(url, "long", LONG, 4)
    await until(long.started.is_set, within_s=20)
    ended = sum(stream.done for stream in shorts)
    await until(lambda: all(stream.done for stream in scene.streams), within_s=20)
    for stream in scene.streams:
        assert stream.status == 200
        assert stream.text.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in stream.text
    return ended


async def test_a_long_prompt_starts_because_a_request_moved() -> None:
    store = MemoryStore(time.monotonic)
    async with fleet(store) as scene, gateway(store, policy(requeue=False, price_moves=False)) as url:
        assert await play(scene, url) == 0
        await until_moved(url, "memory")
        counted = await metrics(url)
        assert counted["midstream_gateway_rebalancing"] == 1
        assert counted['midstream_gateway_migration_bytes_total{reason="memory"}'] > 0
        assert counted["midstream_gateway_switches_total"] >= 1


async def test_without_rebalancing_it_waits_for_a_short_one_to_end() -> None:
    store = MemoryStore(time.monotonic)
    async with fleet(store) as scene, gateway(store, policy(), rebalance=False) as url:
        assert await play(scene, url) >= 1
        assert await moved(url, "memory") == 0


async def test_a_blocked_head_goes_where_it_starts_at_once() -> None:
    store = MemoryStore(time.monotonic)
    async with fleet(store) as scene, gateway(store, policy(migrate=True, price_moves=False, out_tokens=-1e9)) as url:
        shorts = await scene.fill(url, SHORT, TOKENS)
        tail = scene.ask(url, "tail", 100, TOKENS + 40)  # to i1 or i2: the next goes to the other one
        await until(tail.started.is_set)
        busy, other = sorted(scene.sites, key=lambda each: -each.engine.load().running)
        blocked = scene.ask(url, "blocked", LONG, 4)
        await until(lambda: other.engine.load().waiting == 1)
        assert not blocked.started.is_set()
        for short in shorts:
            assert not short.done
        # The busy instance gets room as its short ones are told to go; the blocked one follows the room.
        busy.engine.runner.end(next(one for one in busy.engine.runner.generations() if one.request.prompt_tokens == SHORT))
        await until(blocked.started.is_set)
        await until_moved(url, "queue")
        counted = await metrics(url)
        assert counted['midstream_gateway_migrations_total{outcome="moved",reason="queue"}'] == 1
        assert counted['midstream_gateway_migration_bytes_total{reason="queue"}'] == 0
        await until(lambda: all(stream.done for stream in scene.streams), within_s=20)


async def test_one_of_two_gateways_moves_and_the_other_takes_over(redis_store: RedisStore) -> None:  # noqa: F811
    async with fleet(redis_store) as scene, gateway(redis_store, policy(requeue=False), gateway_id="g") as first:
        await until(leads(first))
        async with gateway(redis_store, policy(requeue=False), gateway_id="g") as second:
            assert await play(scene, second) == 0
            await until_moved(first, "memory")
            assert await moved(second, "memory") == 0
            assert not await leads(second)()
    async with gateway(redis_store, policy(), gateway_id="g2") as third:
        await until(leads(third), within_s=2.0)


def leads(url: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return (await metrics(url))["midstream_gateway_rebalancing"] == 1

    return look


async def test_it_pauses_while_the_store_is_down_and_goes_on_after(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(time.monotonic)
    down = asyncio.Event()
    acquire = store.leases.acquire

    async def failing(*arguments: object) -> object:
        if down.is_set():
            await asyncio.sleep(3600)
        return await acquire(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store.leases, "acquire", failing)
    async with gateway(store, policy(), rebalance_lease_ttl_s=0.2) as url:
        await until(leads(url))
        down.set()
        await until(_not(leads(url)))
        down.clear()
        await until(leads(url))


def _not(condition: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return not await condition()

    return look


async def test_a_new_instance_takes_its_share_for_the_price() -> None:
    """Ten requests slow each other down, by what the engine has measured; an empty one beside them takes some."""
    store = MemoryStore(time.monotonic)
    costs = {"decode_base_s": 0.005, "decode_per_request_s": 0.008, "capacity_blocks": 256}
    moving = policy(out_tokens=-1e9, requeue=False)
    async with site("i1", store, **costs) as first, gateway(store, moving) as url, asyncio.TaskGroup() as tasks:
        streams = []
        for number in range(8):
            streams.append(Stream(f"r{number}"))
            tasks.create_task(streams[-1].read(url, 60, 100))
            await until(lambda: streams[-1].events > 5)
        cost = first.engine.load().cost
        assert cost.per_request_s + 100 * cost.per_token_s > 0.001  # which of the two it is, requests of one length do not tell
        async with site("i2", store, **costs) as second:
            await until(lambda: second.engine.load().running >= 2, within_s=10)
            await until_moved(url, "price", 2)
            await until(lambda: all(stream.done for stream in streams), within_s=20)
    for stream in streams:
        assert stream.text.endswith(b"data: [DONE]\n\n")
        assert stream.events >= 100


async def test_what_a_stalled_gateway_orders_too_late_is_refused(redis_store: RedisStore) -> None:  # noqa: F811
    """It took the lease, and slept; another one acts by now; then it wakes up and believes that nothing has happened."""
    settings = GatewaySettings.model_validate({"gateway_id": "sleeper"})
    async with fleet(redis_store) as scene, Upstream.open(5.0) as upstream, open_request_log(None, time.monotonic) as log:
        parts = compose(settings, redis_store, upstream, settings.build_policy(), None, log)
        sleeper = Office("rebalance", "sleeper", redis_store.leases, ttl_s=0.2, timeout_s=1, clock=time.monotonic)
        await sleeper.hold()
        old = sleeper.term
        assert old is not None
        async with gateway(redis_store, policy(requeue=False)) as url:
            await until(leads(url))
            assert await play(scene, url) == 0
            await until_moved(url, "memory")
            late = scene.ask(url, "late", 100, 60)
            await until(late.started.is_set)
            holder = next(each for each in scene.sites if each.engine.load().running)
            other = next(each for each in scene.sites if each is not holder)
            view = (await parts.ledger.view(0.0)).find(InstanceId(holder.instance))
            assert view is not None
            plan = MigrationPlan(RequestId("late"), Destination(InstanceId(other.instance), other.url))
            with pytest.raises(UpstreamDeclined) as refused:
                await order(parts, plan, view, token=old.token)
            assert refused.value.answered == 409
            assert not sleeper.may_act(old)
            assert not other.engine.load().running
            await until(lambda: late.done, within_s=10)
