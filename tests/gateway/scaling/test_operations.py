"""Operations over HTTP: a real gateway, a launcher behind its real service, and scripted instances."""

import asyncio
from typing import Any

import pytest

from backend.registry.instance import InstanceState
from backend.registry.memory import MemoryStore
from gateway.scaling.launcher import LaunchState
from migration.leg import InstanceId
from tests.gateway.conftest import make_rig, until
from tests.gateway.scaling.conftest import ScriptedLauncher, scaling_rig


async def test_scale_out_is_over_when_the_new_ones_are_ready() -> None:
    async with scaling_rig() as scaling:
        operation = await scaling.order("scale-out", count=2, model="m")
        shown = await scaling.wait_phase(operation, "starting")
        assert (shown["kind"], shown["origin"], shown["state"], shown["model"]) == ("scale_out", "admin", "running", "m")
        names = [each["instance"] for each in shown["instances"]]
        assert sorted(scaling.launcher.launches) == sorted((name, "m") for name in names)
        for name in names:
            await scaling.come_up(name)
        over = await scaling.wait_phase(operation, "done")
        assert over["state"] == "done"
        assert sorted(step["event"] for step in over["steps"]) == ["launched", "launched", "ready", "ready"]
        (listed,) = (await scaling.rig.client.get("/admin/operations")).json()["operations"]
        assert (listed["id"], listed["state"]) == (operation, "done")
        assert "steps" not in listed
        counted = (await scaling.rig.client.get("/metrics")).text
        assert 'midstream_gateway_operations_total{kind="scale_out",state="done"} 1.0' in counted
        assert 'midstream_gateway_operation_events_total{event="ready",kind="scale_out"} 2.0' in counted


async def test_a_launch_that_is_refused_is_tried_again_and_shown() -> None:
    async with scaling_rig(ScriptedLauncher(refuse=2)) as scaling:
        shown = await scaling.wait_phase(await scaling.order("scale-out", count=1), "starting")
        assert [step["event"] for step in shown["steps"]] == ["refused", "refused", "launched"]
        assert shown["steps"][0]["note"] == "no room"
        assert shown["instances"][0]["attempts"] == 2


async def test_one_that_dies_while_it_starts_is_cleared_away_and_tried_again() -> None:
    async with scaling_rig() as scaling:
        operation = await scaling.order("scale-out", count=1)
        (row,) = (await scaling.wait_phase(operation, "starting"))["instances"]
        scaling.launcher.put(row["instance"], state=LaunchState.EXITED, detail="exit status 1")
        await until(lambda: len(scaling.launcher.launches) == 2, within_s=20.0)
        assert scaling.launcher.stops == [row["instance"]]
        await scaling.come_up(row["instance"])
        over = await scaling.wait_phase(operation, "done")
        assert [step["event"] for step in over["steps"]] == ["launched", "failed", "gone", "launched", "ready"]
        assert over["steps"][1]["note"] == "exit status 1"


async def test_after_some_attempts_an_operation_has_failed() -> None:
    async with scaling_rig(ScriptedLauncher(refuse=99), scale_attempts=3) as scaling:
        over = await scaling.wait_phase(await scaling.order("scale-out", count=1), "failed")
        assert over["state"] == "failed"
        assert len(scaling.launcher.launches) == 3


async def test_a_start_is_cancelled() -> None:
    async with scaling_rig() as scaling:
        operation = await scaling.order("scale-out", count=1)
        await scaling.wait_phase(operation, "starting")
        response = await scaling.rig.client.delete(f"/admin/operations/{operation}")
        assert response.status_code == 202
        await scaling.wait_phase(operation, "cancelled")
        assert not scaling.launcher.known


async def test_scale_in_drains_then_stops_and_tells_of_each_request() -> None:
    async with scaling_rig() as scaling:
        draining = await scaling.add("a")
        draining.remaining = 1
        draining.rows = [{"request": "r", "destination": "b", "result": "refused", "reason": "no_memory", "attempts": 1}]
        operation = await scaling.order("scale-in", instance="a")
        await scaling.wait_phase(operation, "draining")
        await until(lambda: len(draining.orders) > 2, within_s=20.0)
        assert not scaling.launcher.stops
        assert await scaling.order("scale-in", instance="a") == operation
        scaling.launcher.lingering = True
        draining.rows = [{**draining.rows[0], "result": "moved", "reason": "", "attempts": 2}]
        draining.remaining = 0
        await scaling.wait_phase(operation, "stopping")
        refused = await scaling.rig.client.delete(f"/admin/operations/{operation}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_cancellable")
        scaling.launcher.known.clear()
        over = await scaling.wait_phase(operation, "done")
        assert over["requests"] == [{"request": "r", "instance": "a", "destination": "b", "result": "moved", "reason": "", "attempts": 2}]
        assert [step["event"] for step in over["steps"]] == ["drain_ordered", "drained", "gone"]
        again = await scaling.rig.client.post("/admin/scale-in", json={"instance": "a"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "not_launched")


async def test_a_drain_is_cancelled_and_the_instance_takes_requests_again() -> None:
    async with scaling_rig() as scaling:
        draining = await scaling.add("a")
        draining.remaining = 1
        operation = await scaling.order("scale-in", instance="a")
        await scaling.wait_phase(operation, "draining")
        blocked = await scaling.rig.client.post("/admin/instances/a/undrain")
        assert (blocked.status_code, blocked.json()["error"]["code"]) == (409, "operation_running")
        await scaling.rig.client.delete(f"/admin/operations/{operation}")
        assert (await scaling.wait_phase(operation, "cancelled"))["state"] == "cancelled"
        assert draining.orders[-1] == "undrain"
        assert not scaling.launcher.stops
        assert await scaling.order("scale-in", instance="a") != operation


async def test_a_drain_that_takes_too_long_ends_all_the_same() -> None:
    async with scaling_rig(scale_drain_timeout_s=0.05) as scaling:
        (await scaling.add("a")).remaining = 1
        over = await scaling.wait_phase(await scaling.order("scale-in", instance="a"), "done")
        assert [step["event"] for step in over["steps"]] == ["drain_ordered", "overdue", "gone"]


async def test_by_number_those_that_hold_least_are_taken() -> None:
    async with scaling_rig() as scaling:
        for name in ("a", "b", "c"):
            await scaling.add(name)
        over = await scaling.wait_phase(await scaling.order("scale-in", count=2), "done")
        assert [each["instance"] for each in over["instances"]] == ["c", "b"]
        too_many = await scaling.rig.client.post("/admin/scale-in", json={"count": 3})
        assert (too_many.status_code, too_many.json()["error"]["code"]) == (409, "not_enough_instances")


async def test_another_gateway_goes_on_when_the_first_is_gone() -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    launcher = ScriptedLauncher()
    async with scaling_rig(launcher, store, gateway_id="g1", lease_ttl_s=0.3) as first:
        (await first.add("a")).remaining = 1
        operation = await first.order("scale-in", instance="a")
        await first.wait_phase(operation, "draining")
    # Whoever has the lease next dies with it: it has to run out.
    assert await store.leases.acquire("operations", "dead", 0.3) is not None
    async with scaling_rig(launcher, store, gateway_id="g2", lease_ttl_s=0.3) as second:
        assert (await second.show(operation))["state"] == "running"
        await store.withdraw(InstanceId("a"))
        await second.add("a")
        over = await second.wait_phase(operation, "done")
        assert [step["event"] for step in over["steps"]] == ["drain_ordered", "drained", "gone"]


async def test_an_instance_that_nobody_launched_is_not_stopped() -> None:
    async with scaling_rig() as scaling:
        await scaling.rig.add("a")
        scaling.launcher.stoppable = False
        await scaling.add("b")
        for instance, status, code in (("a", 409, "not_launched"), ("b", 409, "not_stoppable"), ("x", 404, "instance_not_found")):
            response = await scaling.rig.client.post("/admin/scale-in", json={"instance": instance})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("scale-out", b""),
        ("scale-out", b"[]"),
        ("scale-out", b"{}"),
        ("scale-out", b'{"count":0}'),
        ("scale-out", b'{"count":true}'),
        ("scale-out", b'{"count":1,"model":5}'),
        ("scale-out", b'{"count":1,"modle":"m"}'),
        ("scale-in", b"{}"),
        ("scale-in", b'{"count":1,"instance":"a"}'),
        ("scale-in", b'{"instance":""}'),
    ],
)
async def test_malformed_orders(path: str, body: bytes) -> None:
    async with scaling_rig() as scaling:
        response = await scaling.rig.client.post(f"/admin/{path}", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_order")
        assert not (await scaling.rig.client.get("/admin/operations")).json()["operations"]


async def test_without_a_launcher_nothing_can_be_ordered() -> None:
    async with make_rig() as rig:
        for path, body in (("scale-out", {"count": 1}), ("scale-in", {"instance": "a"})):
            response = await rig.client.post(f"/admin/{path}", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (409, "no_launcher")
        missing = await rig.client.get("/admin/operations/op-1")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "operation_not_found")


async def test_a_launcher_that_does_not_answer() -> None:
    async with scaling_rig(launcher_token="wrong") as scaling:
        await scaling.rig.add("a")
        response = await scaling.rig.client.post("/admin/scale-in", json={"count": 1})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "launcher_failed")


async def test_drain_and_undrain_by_hand() -> None:
    async with scaling_rig() as scaling:
        draining = await scaling.add("a")
        draining.remaining = 3
        wanted: dict[str, Any] = {"id": "a", "state": "draining", "elapsed_s": 0.5, "remaining": 3, "requests": []}
        assert (await scaling.rig.client.post("/admin/instances/a/drain")).json() == wanted
        assert (await scaling.rig.client.post("/admin/instances/a/undrain")).json() == {**wanted, "state": "ready"}
        draining.leaving = True
        leaving = await scaling.rig.client.post("/admin/instances/a/undrain")
        assert (leaving.status_code, leaving.json()["error"]["code"]) == (409, "instance_leaving")
        unknown = await scaling.rig.client.post("/admin/instances/x/drain")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "instance_not_found")


async def test_orders_need_the_admin_token() -> None:
    async with scaling_rig(admin_token="secret") as scaling:
        for method, path in (("POST", "scale-out"), ("POST", "scale-in"), ("GET", "operations"), ("POST", "instances/a/drain")):
            response = await scaling.rig.client.request(method, f"/admin/{path}", json={"count": 1})
            assert response.status_code == 401


async def test_a_starting_instance_is_not_ready() -> None:
    async with scaling_rig() as scaling:
        operation = await scaling.order("scale-out", count=1)
        (row,) = (await scaling.wait_phase(operation, "starting"))["instances"]
        await scaling.rig.add(row["instance"], state=InstanceState.STARTING)
        assert (await scaling.show(operation))["state"] == "running"
