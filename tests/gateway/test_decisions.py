"""What a gateway says of why it did what it did."""

import json
import logging
import time

import httpx
import pytest

from backend.registry.memory import MemoryStore
from gateway.policy.config import MidstreamPolicy
from gateway.policy.decision import from_json, replay, to_json
from gateway.policy.tier import Tiers
from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.fake_fleet import fleet, gateway
from tests.gateway.scripted import Exchange, told


async def answers(exchange: Exchange) -> None:
    await exchange.stream(*told())


async def test_a_dispatch_is_kept_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with make_rig(log_decisions="all") as rig:
        await _two_dispatches(rig, caplog)


async def _two_dispatches(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.gateway.decisions")
    (await rig.add("a")).script = answers
    (await rig.add("b", running=3)).script = answers
    await rig.ask(headers={"x-request-id": "first", "priority": "high"})
    await rig.ask(headers={"x-request-id": "second"})
    latest, first = (await rig.client.get("/admin/decisions")).json()["decisions"]
    assert (latest["number"], latest["requests"], first["requests"]) == (2, ["second"], ["first"])
    assert (first["kind"], first["chosen"]) == ("bind", ["a"])
    assert [row["instance"] for row in first["alternatives"]["first"]] == ["a", "b"]
    assert [view["instance"] for view in first["decision"]["view"]] == ["a", "b"]
    assert first["decision"]["line"]["waiting"][0]["view"]["tier"] == "high"
    for told_of in (latest, first):
        assert to_json(replay(from_json(told_of["decision"]))) == told_of["decision"]
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert lines == [first, latest]
    assert await rig.metric('midstream_gateway_decisions_total{instance="a",kind="bind"} 2.0')


async def test_decisions_can_be_narrowed(rig: Rig) -> None:
    (await rig.add("a")).script = answers
    for name in ("one", "two", "three"):
        await rig.ask(headers={"x-request-id": name})

    async def names(query: str) -> list[str]:
        found = (await rig.client.get(f"/admin/decisions?{query}")).json()["decisions"]
        return [row["requests"][0] for row in found]

    assert await names("limit=2") == ["three", "two"]
    assert await names("request=two") == ["two"]
    assert await names("kind=bind&request=one&limit=9") == ["one"]
    assert await names("kind=move") == []
    for query, param in (("kind=hope", "kind"), ("limit=-1", "limit"), ("limit=x", "limit"), ("limit=", "limit")):
        answer = await rig.client.get(f"/admin/decisions?{query}")
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "invalid_query", param)


async def test_a_bounded_number_is_kept_and_dispatches_are_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.gateway.decisions")
    async with make_rig(decisions_kept=2) as rig:
        (await rig.add("a")).script = answers
        for _ in range(4):
            await rig.ask()
        kept = (await rig.client.get("/admin/decisions")).json()["decisions"]
        assert [row["number"] for row in kept] == [4, 3]
    assert not caplog.records


async def test_a_move_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.gateway.decisions")
    store = MemoryStore(time.monotonic)
    moving = MidstreamPolicy(interval_s=0.05, requeue=False, price_moves=False).build(Tiers())
    async with fleet(store) as scene, gateway(store, moving) as url, httpx.AsyncClient(timeout=10) as client:
        await scene.fill(url, 600, 90)
        long = scene.ask(url, "long", 1000, 4)
        await until(long.started.is_set, within_s=20)
        first = (await client.get(f"{url}/admin/decisions?kind=move")).json()["decisions"][-1]
    assert first["reason"] == "memory"
    assert first["requests"][0].startswith("short-")
    assert first["source"]["freeness"] < 48 < first["destination"]["freeness"]
    assert first["chosen"] == [first["destination"]["instance"]]
    assert first["alternatives"] == [
        {"source": first["source"]["instance"], "destination": first["destination"]["instance"], "reason": "memory"}
    ]
    assert to_json(replay(from_json(first["decision"]))) == first["decision"]
    assert json.loads(caplog.records[0].getMessage()) == first
