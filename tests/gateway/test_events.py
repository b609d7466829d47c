import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sse_starlette.sse import AppStatus

from backend.registry.instance import InstanceState
from backend.registry.memory import MemoryStore
from backend.registry.news import MemoryNews
from backend.registry.redis import RedisStore
from backend.registry.redis_news import CHANNEL
from backend.registry.store import InstanceStore, StoreError
from gateway.events import EventFeed, GatewayEvent
from migration.leg import InstanceId
from tests.backend.registry.conftest import redis_store, redis_url, store
from tests.gateway.conftest import Rig, make_rig, report, until
from tests.gateway.scripted import Exchange, control, head_of_attachment, moving, shown, told
from tests.gateway.test_admin import OUTCOME, moves, two

__all__ = ["redis_store", "redis_url", "store"]


@pytest.fixture(autouse=True)
def nothing_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """sse-starlette ends all feeds of a process once any of its uvicorn servers was told to stop; another test may have done so."""
    monkeypatch.setattr(AppStatus, "should_exit", False)


class Listener:
    """Reads one feed, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event's type and data; comments are passed over."""
        kind, data = "", ""
        async with asyncio.timeout(5):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    data = value
                elif not line and data:
                    return kind, json.loads(data)
        raise EOFError

    async def comment(self) -> str:
        async with asyncio.timeout(5):
            async for line in self._lines:
                if line.startswith(":"):
                    return line
        raise EOFError


@asynccontextmanager
async def listening(rig: Rig, headers: dict[str, str] | None = None) -> AsyncIterator[Listener]:
    async with (
        httpx.AsyncClient(base_url=rig.url, timeout=10) as client,
        client.stream("GET", "/admin/events", headers=headers) as response,
    ):
        yield Listener(response)


async def test_migrations_are_told_from_order_to_end(rig: Rig) -> None:
    source, _ = await two(rig)
    async with listening(rig) as listener:
        assert listener.response.headers["content-type"].startswith("text/event-stream")
        states = [{"id": "a", "state": "ready"}, {"id": "b", "state": "ready"}]
        assert await listener.next() == ("instances", {"instances": states})
        source.others["/midstream/migrations"] = moves({**OUTCOME, "result": "refused", "reason": "no_memory"})
        answer = (await rig.client.post("/admin/migrations", json={"request": "r"})).json()
        order = {"request": "r", "source": "a", "destination": "b", "mode": "live"}
        assert await listener.next() == ("migration_ordered", order)
        assert await listener.next() == ("migration_ended", answer)
        assert (answer["outcome"], answer["result"]) == ("no_memory", "refused")


async def test_an_order_that_its_source_fails_has_an_end_too(rig: Rig) -> None:
    source, _ = await two(rig)
    source.others["/midstream/migrations"] = moves({"error": {}}, 409)
    async with listening(rig) as listener:
        await listener.next()
        assert (await rig.client.post("/admin/migrations", json={"request": "r"})).status_code == 502
        assert (await listener.next())[0] == "migration_ordered"
        kind, fields = await listener.next()
        assert (kind, fields["outcome"], fields["result"], fields["request"]) == ("migration_ended", "instance_failed", "failed", "r")


async def test_a_switch_is_told_with_the_gap_its_client_saw(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    events = told()

    async def leave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*events[:4], moving(1, second), control(kind="moved", epoch=1))
        await exchange.end()

    async def go_on(exchange: Exchange) -> None:
        await exchange.stream(head_of_attachment(), *events)

    first.script = leave
    second.others["/midstream/streams"] = go_on
    async with listening(rig) as listener:
        await listener.next()
        answer = await rig.ask(headers={"x-request-id": "mine"})
        assert answer.content == shown(events)
        kind, fields = await listener.next()
        gap_ms = fields.pop("gap_ms")
        assert (kind, fields) == ("switch", {"request": "mine", "epoch": 1, "source": "a", "destination": "b"})
        assert 0 <= gap_ms < 5000


async def test_instances_that_come_change_and_go_are_told(rig: Rig) -> None:
    await rig.add("a")
    async with listening(rig) as listener:
        assert await listener.next() == ("instances", {"instances": [{"id": "a", "state": "ready"}]})
        await rig.store.publish(report("b", state=InstanceState.STARTING), ttl_s=1000)
        assert await listener.next() == ("instance", {"id": "b", "change": "appeared", "state": "starting", "was": None})
        await rig.store.publish(report("b"), ttl_s=1000)
        assert await listener.next() == ("instance", {"id": "b", "change": "changed", "state": "ready", "was": "starting"})
        await rig.store.withdraw(InstanceId("b"))
        assert await listener.next() == ("instance", {"id": "b", "change": "disappeared", "state": None, "was": "ready"})


async def test_a_silent_feed_is_kept_open() -> None:
    async with make_rig(keepalive_interval_s=0.05) as rig, listening(rig) as listener:
        assert await listener.next() == ("instances", {"instances": []})
        assert await listener.comment() == ": keep-alive"


async def test_a_gateway_that_stops_ends_the_feed_in_good_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(rig) as listener:
        await listener.next()
        monkeypatch.setattr(AppStatus, "should_exit", True)
        with pytest.raises(EOFError):
            await listener.next()


async def test_the_feed_is_for_operators() -> None:
    async with make_rig(admin_token="secret") as rig:
        answer = await rig.client.get("/admin/events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_admin_token")
        async with listening(rig, {"authorization": "Bearer secret"}) as listener:
            assert (await listener.next())[0] == "instances"


async def test_a_slow_listener_loses_the_oldest_and_is_told_how_many() -> None:
    feed = EventFeed(limit=2)
    slow, fast = feed.open(), feed.open()
    with feed.listening(slow), feed.listening(fast):
        for number in range(1, 6):
            feed.publish("counted", {"n": number})
            assert await fast.next() == GatewayEvent(number, "counted", {"n": number})
        assert await slow.next() == GatewayEvent(0, "skipped", {"events": 3})
        assert [await slow.next(), await slow.next()] == [GatewayEvent(n, "counted", {"n": n}) for n in (4, 5)]
    feed.publish("unheard", {})
    assert not feed.heard
    slow.close()
    assert await slow.next() is None


async def test_who_leaves_is_not_listening_any_more() -> None:
    feed = EventFeed(limit=2)
    subscription = feed.open()
    async with asyncio.TaskGroup() as group:

        async def listen() -> None:
            with feed.listening(subscription):
                await subscription.next()

        task = group.create_task(listen())
        await until(lambda: feed.heard)
        task.cancel()
    assert not feed.heard


async def test_what_happens_at_another_gateway_is_told_too(store: InstanceStore) -> None:
    async with make_rig(store, gateway_id="g1") as here, make_rig(store, gateway_id="g2") as there:
        source, _ = await two(here)
        source.others["/midstream/migrations"] = moves({**OUTCOME, "result": "refused", "reason": "no_memory"})
        async with listening(here) as mine, listening(there) as theirs:
            for listener in (mine, theirs):
                assert (await listener.next())[0] == "instances"
            await heard(store)
            await here.client.post("/admin/migrations", json={"request": "r"})
            told = [await mine.next(), await mine.next()]
            assert [kind for kind, _ in told] == ["migration_ordered", "migration_ended"]
            assert [await theirs.next(), await theirs.next()] == [(kind, {**fields, "gateway": "g1"}) for kind, fields in told]
            await here.store.publish(report("c"), ttl_s=1000)
            for listener in (mine, theirs):
                assert await listener.next() == ("instance", {"id": "c", "change": "appeared", "state": "ready", "was": None})


async def heard(store: InstanceStore) -> None:
    """Return when both gateways hear what is told."""

    async def both() -> bool:
        if isinstance(store, RedisStore):
            return dict(await store._link._redis.pubsub_numsub(CHANNEL))[CHANNEL] == 2
        assert isinstance(store, MemoryStore)
        return len(store.news._hearings) == 2

    await until(both)


async def test_what_makes_no_sense_is_passed_over() -> None:
    shared = MemoryStore(time.monotonic)
    async with make_rig(shared) as rig, listening(rig) as listener:
        await listener.next()
        for text in ("", "[]", "{}", '{"teller": "x", "gateway": "g", "kind": "switch", "fields": 3}'):
            await shared.news.tell(text)
        await shared.news.tell('{"teller": "x", "gateway": "g", "kind": "switch", "fields": {"epoch": 1}}')
        assert await listener.next() == ("switch", {"epoch": 1, "gateway": "g"})


async def test_a_store_that_does_not_answer_costs_only_what_others_tell() -> None:
    class Silent(MemoryNews):
        async def tell(self, text: str) -> None:
            raise StoreError("down")

    shared = MemoryStore(time.monotonic)
    shared.news = Silent()
    async with make_rig(shared) as rig:
        source, _ = await two(rig)
        source.others["/midstream/migrations"] = moves({**OUTCOME, "result": "refused", "reason": "no_memory"})
        async with listening(rig) as listener:
            await listener.next()
            for _ in range(2):
                await rig.client.post("/admin/migrations", json={"request": "r"})
            assert [(await listener.next())[0] for _ in range(4)] == ["migration_ordered", "migration_ended"] * 2
