"""Several gateways' real dispatchers and lines over one store, driven step by step: what holds whatever happens in whatever order."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis import Redis

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore
from gateway.decisions import DecisionLog
from gateway.dispatcher import Dispatcher
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from gateway.suspects import Suspects
from migration.leg import RequestId
from tests.backend.registry.conftest import redis_url
from tests.gateway.conftest import report, until

__all__ = ["redis_url"]


class Gateway:
    """What of one gateway chooses instances. Nothing runs by itself."""

    def __init__(self, name: str, store: InstanceStore, seed: int) -> None:
        chosen = GatewaySettings(_env_file=None, gateway_id=name, store_timeout_s=20)
        clock, metrics, policy = time.monotonic, Metrics(CollectorRegistry()), chosen.build_policy()
        suspects = Suspects(clock, 0.0)
        self.ledger = Ledger(store, chosen, clock, metrics)
        decisions = DecisionLog(0, logged=frozenset(), metrics=metrics)
        self.line = Line(self.ledger, policy, suspects, chosen, clock, metrics, decisions)
        self.dispatcher = Dispatcher(self.ledger, self.line, policy, suspects, chosen, clock, metrics, Random(seed), decisions)


@dataclass(eq=False)
class Client:
    """One request. `arrived` orders those of one scene."""

    name: str
    arrived: int
    tokens: int
    tier: str
    gateway: Gateway
    done: asyncio.Event = field(default_factory=asyncio.Event)
    instance: str | None = None
    ahead: bool = False
    task: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        async with self.gateway.ledger.place(RequestId(self.name), self.tier, self.tokens) as place:
            view = await self.gateway.dispatcher.choose(place, "m", frozenset())
            self.ahead = place.ahead
            self.instance = view.id
            await self.done.wait()


@dataclass(eq=False)
class World:
    """Instances that never report anything new: what they hold is what was claimed."""

    store: InstanceStore
    gateways: list[Gateway]
    clients: list[Client] = field(default_factory=list)

    @classmethod
    async def open(cls, store: InstanceStore, gateways: int, blocks: list[int], seed: int = 1) -> "World":
        for n, count in enumerate(blocks):
            sized = replace(report(f"i{n}"), capacity_tokens=count * 16, free_tokens=count * 16, max_batch=64)
            await store.publish(sized, ttl_s=1000)
        return cls(store, [Gateway(f"g{n}", store, seed + n) for n in range(gateways)])

    async def ask(self, gateway: int, tokens: int, tier: str) -> None:
        client = Client(f"r{len(self.clients):03}", len(self.clients), tokens, tier, self.gateways[gateway % len(self.gateways)])
        self.clients.append(client)
        client.task = asyncio.get_running_loop().create_task(client.run())

        async def settled() -> bool:
            return client.instance is not None or client.name in await self.waiting()

        await until(settled)

    async def waiting(self) -> list[str]:
        return [standing.ticket.request for standing in (await self.store.line.look("m", 1000)).standings]

    async def release(self, number: int) -> None:
        placed = [client for client in self.clients if client.instance is not None and not client.done.is_set()]
        if placed:
            client = placed[number % len(placed)]
            client.done.set()
            assert client.task is not None
            await client.task

    async def bind(self, gateway: int) -> None:
        await self.gateways[gateway % len(self.gateways)].line.bind("m")
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Everybody looks until nobody finds anything more to do."""
        await until(self._all_stand)
        before: list[str] | None = None
        while (now := await self.waiting()) != before:
            before = now
            for n in range(len(self.gateways)):
                await self.bind(n)

    def _all_stand(self) -> bool:
        """Who has no instance waits in its gateway, too, and not only in the store."""
        standing = sum(gateway.line.length(tier) for gateway in self.gateways for tier in ("high", "normal", "batch"))
        return standing == sum(client.instance is None for client in self.clients)

    async def close(self) -> None:
        for client in self.clients:
            client.done.set()
            assert client.task is not None
            client.task.cancel()
        await asyncio.gather(*(client.task for client in self.clients if client.task), return_exceptions=True)
        assert list(await self.store.claims()) == []
        assert await self.waiting() == []
        assert (await self.store.line.look("m", 0)).ahead == 0

    @property
    def live(self) -> list[Client]:
        return [client for client in self.clients if client.instance is not None and not client.done.is_set()]

    async def check(self) -> None:
        """What must hold when nobody finds anything to do."""
        waiting = set(await self.waiting())
        views = {view.id: view for view in (await self.gateways[0].ledger.view(0.0)).instances}
        closed = {client.instance for client in self.live if client.ahead}
        assert len([client for client in self.live if client.ahead]) <= 2
        for client in self.clients:
            if client.name not in waiting:
                continue
            for view in views.values():  # no instance stands idle while somebody who fits waits
                here = [other for other in self.live if other.instance == view.id]
                free = view.report.free_tokens - sum(other.tokens for other in here)
                if here:
                    free -= int(kept_free(view.report.capacity_tokens, len(here) + 1))
                assert view.id in closed or free // 16 * 16 < client.tokens, (client, view.id)
            passed = [o.name for o in self.live if o.tier == client.tier and o.arrived > client.arrived and o.tokens >= client.tokens]
            assert not passed, (client.name, passed)  # order within a tier
        for view in views.values():
            here = [other for other in self.live if other.instance == view.id]
            if view.id not in closed:
                assert sum(other.tokens for other in here) <= view.report.free_tokens


def kept_free(capacity_tokens: int, requests: int) -> float:
    """What the default policy wants to stay free beside so many: a block for each, and what their answers of about 256 tokens may need."""
    return max(16 * requests, 0.02 * capacity_tokens, min(0.4 * 256 * sqrt(requests), 0.1 * capacity_tokens))


asked = st.tuples(
    st.just("ask"), st.integers(0, 3), st.sampled_from([10, 150, 200, 400]), st.sampled_from(["normal", "normal", "high", "batch"])
)
released = st.tuples(st.just("release"), st.integers(0, 20), st.just(0), st.just(""))
bound = st.tuples(st.just("bind"), st.integers(0, 3), st.just(0), st.just(""))
scripts = st.lists(asked | asked | asked | released | bound, min_size=8, max_size=24)


@dataclass(eq=False)
class Place:
    """Where worlds are made: a loop, and an empty store for each."""

    loop: asyncio.AbstractEventLoop
    make: Callable[[], InstanceStore]
    examples: int

    def run(self, act: Callable[[InstanceStore], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(act(self.make()))


@pytest.fixture(params=["memory", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    loop = asyncio.new_event_loop()
    if request.param == "memory":
        yield Place(loop, lambda: MemoryStore(time.monotonic), 60)
    else:
        url = request.getfixturevalue("redis_url")
        store = RedisStore(url, timeout_s=20)

        def emptied() -> InstanceStore:
            with Redis.from_url(url) as client:
                client.flushall()
            return store

        yield Place(loop, emptied, 12)
        loop.run_until_complete(store.close())
    loop.close()


@pytest.mark.timeout(180)
def test_nobody_who_fits_waits_nobody_is_passed_and_no_memory_is_given_twice(place: Place) -> None:
    async def play(store: InstanceStore, blocks: list[int], script: list[tuple[str, int, int, str]]) -> None:
        world = await World.open(store, 4, blocks)
        try:
            for act, number, tokens, tier in script:
                match act:
                    case "ask":
                        await world.ask(number, tokens, tier)
                    case "release":
                        await world.release(number)
                    case "bind":
                        await world.bind(number)
            await world.settle()
            await world.check()
        finally:
            await world.close()

    @settings(max_examples=place.examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.integers(26, 40), min_size=1, max_size=3), scripts)
    def play_all(blocks: list[int], script: list[tuple[str, int, int, str]]) -> None:
        place.run(lambda store: play(store, blocks, script))

    play_all()


@pytest.mark.timeout(60)
def test_many_gateways_do_not_herd(place: Place) -> None:
    """vllm-project/router#177: all ask at the same moment, from the same view."""

    async def play(store: InstanceStore) -> None:
        world = await World.open(store, 8, [400] * 4)
        try:
            await asyncio.gather(*(world.ask(n, 30, "normal") for n in range(8)))
            for _ in range(4):
                await asyncio.gather(*(world.ask(n, 30, "normal") for n in range(8)))
            await world.settle()
            assert await world.waiting() == []
            spread = Counter(client.instance for client in world.clients)
            assert len(spread) == 4
            # What others in line are to get counts as taken, whether they get it or not: so it is not even to the last one.
            assert max(spread.values()) <= 15, "half as much again as its share"
        finally:
            await world.close()

    place.run(play)


@pytest.mark.timeout(60)
def test_ties_are_spread_evenly(place: Place) -> None:
    async def play(store: InstanceStore) -> None:
        world = await World.open(store, 2, [40] * 4)
        try:
            for n in range(160):
                await world.ask(n, 30, "normal")
                await world.release(0)
            spread = Counter(client.instance for client in world.clients)
            assert len(spread) == 4
            assert min(spread.values()) >= 20
        finally:
            await world.close()

    place.run(play)
