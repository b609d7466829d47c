"""Requests in line: real gateways, over one store, in front of instances with few slots."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from backend.registry.line import LineLimits, Ticket
from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore, StoreError
from migration.leg import RequestId
from tests.backend.registry.conftest import redis_store, redis_url
from tests.gateway.conftest import BODY, Rig, make_rig, report, until
from tests.gateway.scripted import Exchange, ScriptedBackend, control, scripted_backend, shown, told

__all__ = ["redis_store", "redis_url"]

EVENTS = told()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> InstanceStore:
    if request.param == "memory":
        return MemoryStore(time.monotonic)
    shared: RedisStore = request.getfixturevalue("redis_store")
    return shared


@dataclass(eq=False)
class Slots:
    """An instance with so many slots, that holds each answer until it is told to go on."""

    backend: ScriptedBackend
    going: dict[str, asyncio.Event] = field(default_factory=dict)

    async def __call__(self, exchange: Exchange) -> None:
        go = self.going.setdefault(exchange.headers["x-request-id"], asyncio.Event())
        await exchange.head()
        await exchange.send(*EVENTS[:2])
        await go.wait()
        await exchange.send(*EVENTS[2:])
        await exchange.end()

    @property
    def order(self) -> list[str]:
        return [exchange.headers["x-request-id"] for exchange in self.backend.seen]

    async def go(self, request: str) -> None:
        """Let that answer end, once it has begun."""
        await until(lambda: request in self.going)
        self.going[request].set()


@dataclass(eq=False)
class Scene:
    store: InstanceStore
    gateways: list[Rig]
    tasks: asyncio.TaskGroup
    stack: AsyncExitStack

    async def instance(self, name: str = "a", slots: int = 1, **fields: Any) -> Slots:
        backend = await self.stack.enter_async_context(scripted_backend(name))
        held = Slots(backend)
        backend.script = held
        await self.store.publish(replace(report(name, backend.url), max_batch=slots, **fields), ttl_s=1000)
        return held

    def ask(self, name: str, tier: str = "normal", gateway: int = 0, **fields: Any) -> "asyncio.Task[httpx.Response]":
        headers = {"x-request-id": name, "priority": tier}
        return self.tasks.create_task(self.gateways[gateway].ask(headers=headers, **fields))

    async def waiting(self) -> list[str]:
        return [standing.ticket.request for standing in (await self.store.line.look("m", 100)).standings]

    async def ask_in_line(self, name: str, tier: str = "normal", gateway: int = 0) -> "asyncio.Task[httpx.Response]":
        task = self.ask(name, tier, gateway)

        async def is_in() -> bool:
            return name in await self.waiting()

        await until(is_in)
        return task


@asynccontextmanager
async def open_scene(store: InstanceStore, gateways: int = 1, **settings: Any) -> AsyncIterator[Scene]:
    """Only what the store tells wakes anybody: the poll is too slow for these tests."""
    async with AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(make_rig(store, **{"line_poll_s": 60, "gateway_id": f"g{n}", **settings}))
            for n in range(gateways)
        ]
        async with asyncio.TaskGroup() as tasks:
            yield Scene(store, rigs, tasks, stack)


async def test_who_finds_no_room_waits_and_is_told_how_long(store: InstanceStore) -> None:
    async with open_scene(store) as scene:
        slots = await scene.instance()
        first = scene.ask("first")
        await until(lambda: "first" in slots.going)
        second = await scene.ask_in_line("second")
        assert await scene.gateways[0].metric('midstream_gateway_queue_length{tier="normal"} 1.0')
        await slots.go("first")
        await slots.go("second")
        assert (await first).headers["x-midstream-queued-ms"] == "0"
        assert int((await second).headers["x-midstream-queued-ms"]) > 0
        assert (await second).content == shown(EVENTS)
        assert await scene.gateways[0].metric('midstream_gateway_queue_length{tier="normal"} 0.0')
        assert await scene.gateways[0].metric('midstream_gateway_queued_seconds_count{tier="normal"} 1.0')
        assert await scene.gateways[0].metric('midstream_gateway_objectives_total{objective="ttft",outcome="met",tier="normal"} 2.0')


async def test_the_tier_of_the_body_travels_on() -> None:
    async with open_scene(MemoryStore(time.monotonic)) as scene:
        slots = await scene.instance()
        asked = scene.tasks.create_task(scene.gateways[0].ask(headers={"x-request-id": "r"}, service_tier="flex"))
        await slots.go("r")
        assert (await asked).headers["x-midstream-tier"] == "batch"
        seen = slots.backend.seen[0].headers
        assert (seen["x-midstream-tier"], seen["x-midstream-rank"]) == ("batch", "2")
        assert await scene.gateways[0].metric('midstream_gateway_objectives_total{objective="tpot",outcome="met",tier="batch"} 1.0')


async def test_the_order_holds_across_gateways(store: InstanceStore) -> None:
    async with open_scene(store, gateways=2) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        for name, tier, gateway in (("b1", "batch", 0), ("n1", "normal", 1), ("n2", "normal", 0), ("h1", "high", 1), ("b2", "batch", 1)):
            await scene.ask_in_line(name, tier, gateway)
        assert await scene.waiting() == ["h1", "n1", "n2", "b1", "b2"]
        expected = ["busy", "h1", "n1", "n2", "b1", "b2"]
        for name in expected:
            await slots.go(name)
        assert slots.order == expected


async def test_a_newcomer_waits_behind_the_others_gateways_requests(store: InstanceStore) -> None:
    """Though there is room: it is for the one before it."""
    async with open_scene(store, gateways=1) as scene:
        slots = await scene.instance()
        theirs = Ticket(RequestId("theirs"), "m", "another", "normal", 1, 10)
        assert await store.line.join(theirs, LineLimits(None, 9), 60)
        await scene.ask_in_line("mine")
        scene.ask("urgent", "high")
        await slots.go("urgent")
        assert slots.order == ["urgent"]
        assert await scene.waiting() == ["theirs", "mine"]
        await store.line.leave(theirs.request)
        await slots.go("mine")


async def test_a_dead_gateways_places_vanish(store: InstanceStore) -> None:
    async with open_scene(store) as scene:
        slots = await scene.instance()
        for n in range(3):
            await store.line.join(Ticket(RequestId(f"dead{n}"), "m", "dead", "high", 0, 10), LineLimits(None, 9), 0.5)
        mine = await scene.ask_in_line("mine")
        assert slots.order == []

        async def heard() -> bool:
            await store.sightings()  # any script sweeps; backends publish all the time
            return bool(slots.order)

        await until(heard)
        await slots.go("mine")
        assert (await mine).status_code == 200


async def test_a_client_that_leaves_is_forgotten_at_once(store: InstanceStore) -> None:
    async with open_scene(store) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        async with httpx.AsyncClient(base_url=scene.gateways[0].url) as client:
            leaving = scene.tasks.create_task(client.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "leaves"}))
            after = await scene.ask_in_line("after")
            assert await scene.waiting() == ["leaves", "after"]
            leaving.cancel()

        async def gone() -> bool:
            return await scene.waiting() == ["after"]

        await until(gone, within_s=1.0)
        await slots.go("busy")
        await slots.go("after")
        assert (await after).status_code == 200
        assert slots.order == ["busy", "after"]


async def test_a_request_that_an_instance_failed_waits_for_another(store: InstanceStore) -> None:
    """And does not count any more on the one that failed it."""
    async with open_scene(store) as scene:
        slots = await scene.instance("b")
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        broken = await scene.instance("a")

        async def fail(exchange: Exchange) -> None:
            await exchange.answer(500, b"{}")

        broken.backend.script = fail
        retried = await scene.ask_in_line("retried")
        assert len(broken.backend.seen) == 1
        assert [claim.request for claim in await store.claims()] == ["busy"]
        await slots.go("busy")
        await slots.go("retried")
        assert (await retried).headers["x-midstream-instance"] == "b"
        assert int((await retried).headers["x-midstream-queued-ms"]) > 0


async def test_a_full_queue_is_refused(store: InstanceStore) -> None:
    async with open_scene(store, gateways=2, tiers={"normal": {"queue_limit": 1}, "batch": {"queue_limit": 5}}) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        await scene.ask_in_line("n1")
        refused = await scene.ask("n2", gateway=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == refused.headers["x-midstream-reason"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        await scene.ask_in_line("b1", "batch", gateway=1)
        for name in ("busy", "n1", "b1"):
            await slots.go(name)


async def test_the_lowest_tier_makes_room(store: InstanceStore) -> None:
    async with open_scene(store, gateways=2, line_limit=2) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        batch = [await scene.ask_in_line(name, "batch", gateway=1) for name in ("b1", "b2")]
        await scene.ask_in_line("h1", "high")
        shed = await batch[1]
        assert (shed.status_code, shed.headers["x-midstream-reason"]) == (429, "queue_full")
        assert await scene.waiting() == ["h1", "b1"]
        for name in ("busy", "h1", "b1"):
            await slots.go(name)


async def test_patience_ends(store: InstanceStore) -> None:
    tiers = {"normal": {"patience_s": 0.1}, "high": {"patience_s": 0.1}}
    async with open_scene(store, tiers=tiers, first_byte_timeout_s=30) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        high = await scene.ask_in_line("h", "high")
        refused = await scene.ask("n")
        assert (refused.status_code, refused.headers["x-midstream-reason"]) == (503, "patience_over")
        assert await scene.waiting() == ["h"]
        await slots.go("busy")
        await slots.go("h")
        assert (await high).status_code == 200


async def test_who_was_preempted_stands_behind_the_others_and_is_not_refused(store: InstanceStore) -> None:
    preempt, seen = asyncio.Event(), asyncio.Event()
    async with open_scene(store, tiers={"normal": {"patience_s": 0.3}}) as scene:
        slots = await scene.instance()

        async def preempts(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*EVENTS[:4])
            seen.set()
            await preempt.wait()
            await exchange.send(control(kind="preempted"))

        async def goes_on(exchange: Exchange) -> None:
            await exchange.stream(*EVENTS)

        slots.backend.script = preempts
        slots.backend.others["/midstream/resume"] = goes_on
        first = scene.ask("first")
        await seen.wait()
        slots.backend.script = slots
        second = await scene.ask_in_line("second")
        preempt.set()
        await until(lambda: "second" in slots.going)
        assert "second" in [claim.request for claim in await store.claims()]
        assert (await first).content == shown(EVENTS)  # its patience was over: it went to the queue of an instance without room
        await slots.go("second")
        assert (await second).content == shown(EVENTS)


async def test_time_in_line_is_not_the_engines(store: InstanceStore) -> None:
    """The deadline of the first byte stands still meanwhile."""
    async with open_scene(store, first_byte_timeout_s=0.4) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        patient = await scene.ask_in_line("patient")
        await asyncio.sleep(0.6)
        await slots.go("busy")
        await slots.go("patient")
        assert (await patient).status_code == 200


async def test_a_head_goes_ahead_of_room_until_it_starts(store: InstanceStore) -> None:
    async with open_scene(store) as scene:
        slots = await scene.instance(slots=9, capacity_tokens=1600, free_tokens=160, running=2)
        long = scene.ask("long", prompt="x" * 4000, messages=None)
        await until(lambda: "long" in slots.going)

        async def started() -> bool:
            return (await store.line.look("m", 0)).ahead == 0

        await until(started)
        await slots.go("long")
        assert (await long).status_code == 200


async def test_places_that_the_store_forgot_are_taken_again(store: InstanceStore) -> None:
    async with open_scene(store, line_ttl_s=0.3) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        await scene.ask_in_line("n1")
        await store.line.leave(RequestId("n1"))

        async def again() -> bool:
            return await scene.waiting() == ["n1"]

        await until(again)
        await slots.go("busy")
        await slots.go("n1")


class FailingLine(MemoryStore):
    """Fails altogether while `down`."""

    down = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("claim", "sightings", "release", "renew", "line") and object.__getattribute__(self, "down"):
            raise StoreError("down")
        return object.__getattribute__(self, name)


async def test_without_a_store_each_gateway_serves_its_own_in_order() -> None:
    store = FailingLine(time.monotonic)
    async with open_scene(store, line_poll_s=0.05, store_retry_s=0.05) as scene:
        slots = await scene.instance()
        scene.ask("busy")
        await until(lambda: "busy" in slots.going)
        await scene.ask_in_line("n1")
        store.down = True
        scene.ask("h1", "high")
        await until(lambda: scene.gateways[0].metric('midstream_gateway_queue_length{tier="high"} 1.0'))
        for name in ("busy", "h1", "n1"):
            await slots.go(name)
        assert slots.order == ["busy", "h1", "n1"]
        store.down = False


@pytest.mark.parametrize("policy", ["least_outstanding", "round_robin", "infaas", "llumnix"])
async def test_policies_without_a_line_place_at_once(policy: str) -> None:
    async with open_scene(MemoryStore(time.monotonic), policy=policy) as scene:
        slots = [await scene.instance(name) for name in "ab"]
        asked = [scene.ask(f"r{n}") for n in range(6)]
        await until(lambda: sum(len(each.going) for each in slots) == 6)
        assert all(len(each.going) >= 2 for each in slots)
        for each in slots:
            for name in list(each.going):
                await each.go(name)
        assert [(await one).headers["x-midstream-queued-ms"] for one in asked] == ["0"] * 6
