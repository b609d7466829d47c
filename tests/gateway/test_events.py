import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sse_starlette.sse import AppStatus

from backend.registry.instance import InstanceState
from gateway.events import EventFeed, GatewayEvent
from migration.leg import InstanceId
from tests.gateway.conftest import Rig, make_rig, report, until
from tests.gateway.scripted import Exchange, control, head_of_attachment, moving, shown, told
from tests.gateway.test_admin import OUTCOME, moves, two


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
