import json
from dataclasses import asdict

import pytest

from backend.registry.instance import InstanceState
from migration.leg import Leg, RequestId
from tests.gateway.conftest import Rig, make_rig, report
from tests.gateway.scripted import Exchange, Script, ScriptedBackend

OUTCOME = {"result": "moved", "reason": "", "epoch": 1, "stages": 2, "bytes": 4096, "frozen_ms": 9.1, "total_ms": 40.0}


def runs(*requests: str) -> Script:
    rows = [{"request": name, "epoch": 0, "tier": "normal", "output_tokens": 3, "prompt_tokens": 4, "state": "decode"} for name in requests]

    async def script(exchange: Exchange) -> None:
        await exchange.answer(200, json.dumps({"requests": rows}).encode())

    return script


def moves(outcome: dict[str, object], status: int = 200) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, json.dumps(outcome).encode())

    return script


async def two(rig: Rig) -> tuple[ScriptedBackend, ScriptedBackend]:
    source, other = await rig.add("a"), await rig.add("b", running=1)
    source.others["/midstream/requests"] = runs("r")
    other.others["/midstream/requests"] = runs()
    source.others["/midstream/migrations"] = moves(OUTCOME)
    return source, other


async def test_instances(rig: Rig) -> None:
    await rig.add("b", state=InstanceState.DRAINING)
    a = await rig.add("a", running=2, models=("m", "n"))
    first, second = (await rig.client.get("/admin/instances")).json()["instances"]
    assert (first["id"], first["state"], first["url"]) == ("a", "ready", a.url)
    assert (first["model"], first["models"], first["running"], first["claims"]) == ("m", ["m", "n"], 2, 0)
    assert (first["free_tokens"], first["capacity_tokens"], first["block_tokens"]) == (900, 1000, report("a").block_tokens)
    assert first["cost"] == asdict(report("a").cost)
    assert (second["id"], second["state"]) == ("b", "draining")


async def test_requests_of_all_instances() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.wait_left()

    async with make_rig(admin_timeout_s=0.2) as rig:
        await two(rig)
        (await rig.add("c")).others["/midstream/requests"] = silent
        answer = (await rig.client.get("/admin/requests")).json()
        (row,) = answer["requests"]
        assert (row["id"], row["instance"], row["output_tokens"], row["epoch"]) == ("r", "a", 3, 0)
        assert answer["silent"] == ["c"]


async def test_migration_to_the_policys_choice(rig: Rig) -> None:
    source, other = await two(rig)
    await rig.add("c", running=5)
    await rig.store.record_switch(Leg(RequestId("r"), 1), 12.3456, 100)
    response = await rig.client.post("/admin/migrations", json={"request": "r"})
    assert response.status_code == 200
    assert response.json() == {
        "outcome": "moved",
        "result": "moved",
        "request": "r",
        "source": "a",
        "destination": "b",
        "mode": "live",
        "stages": 2,
        "bytes": 4096,
        "downtime_ms": 12.346,
        "frozen_ms": 9.1,
        "total_ms": 40.0,
    }
    (order,) = source.asked("/midstream/migrations")
    assert json.loads(order.body) == {"request": "r", "destination": {"instance": "b", "url": other.url}, "mode": "live"}


async def test_migration_with_destination_mode_and_no_downtime_known() -> None:
    async with make_rig(switch_wait_s=0.05) as rig:
        source, _ = await two(rig)
        third = await rig.add("c", running=9)
        response = await rig.client.post("/admin/migrations", json={"request": "r", "destination": "c", "mode": "stop_copy"})
        assert response.json()["destination"] == "c"
        assert response.json()["downtime_ms"] is None
        (order,) = source.asked("/midstream/migrations")
        assert json.loads(order.body) == {"request": "r", "destination": {"instance": "c", "url": third.url}, "mode": "stop_copy"}


async def test_migration_that_did_not_move(rig: Rig) -> None:
    source, _ = await two(rig)
    source.others["/midstream/migrations"] = moves({**OUTCOME, "result": "refused", "reason": "no_memory", "stages": 0, "bytes": 0})
    response = await rig.client.post("/admin/migrations", json={"request": "r"})
    assert response.status_code == 200
    assert (response.json()["outcome"], response.json()["result"]) == ("no_memory", "refused")


async def test_unknown_request_and_no_other_instance(rig: Rig) -> None:
    source = await rig.add("a")
    source.others["/midstream/requests"] = runs("r")
    unknown = await rig.client.post("/admin/migrations", json={"request": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
    for order in ({"request": "r"}, {"request": "r", "destination": "a"}, {"request": "r", "destination": "zz"}):
        alone = await rig.client.post("/admin/migrations", json=order)
        assert (alone.status_code, alone.json()["error"]["code"]) == (409, "no_other_instance")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"request":5}', b'{"request":"r","mode":"warp"}', b'{"request":"r","destination":[]}']
)
async def test_malformed_orders(rig: Rig, body: bytes) -> None:
    response = await rig.client.post("/admin/migrations", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_source_that_fails_the_order(rig: Rig) -> None:
    source, _ = await two(rig)
    for script in (moves({"error": {}}, 409), moves({"result": "moved"})):
        source.others["/midstream/migrations"] = script
        response = await rig.client.post("/admin/migrations", json={"request": "r"})
        assert response.status_code == 502


async def test_token_is_needed_if_set() -> None:
    async with make_rig(admin_token="secret") as rig:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for method, path in (("GET", "/admin/instances"), ("GET", "/admin/requests"), ("POST", "/admin/migrations")):
                response = await rig.client.request(method, path, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_admin_token")
        assert (await rig.client.get("/admin/instances", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await rig.client.get("/health")).status_code == 200


@pytest.mark.parametrize("token", [None, ""])
async def test_without_token_only_on_loopback(token: str | None) -> None:
    async with make_rig(host="0.0.0.0", admin_token=token) as rig:
        response = await rig.client.get("/admin/instances")
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_closed")


async def test_request_is_found_by_asking_when_its_claim_is_gone(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.others["/midstream/requests"] = runs()
    second.others["/midstream/requests"] = runs("r")
    second.others["/midstream/migrations"] = moves({**OUTCOME, "result": "ended", "reason": "request_ended"})
    response = await rig.client.post("/admin/migrations", json={"request": "r"})
    assert (response.json()["source"], response.json()["destination"]) == ("b", "a")
