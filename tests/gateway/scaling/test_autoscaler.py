"""The auto-scaler with its real rules over scripted instances, and with a rule that a test writes."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from backend.registry.memory import MemoryStore
from backend.registry.store import InstanceStore
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.policy.autoscale import DemandScaling, FreenessRange, ScaleDecision, ScaleMemory, ScaleView
from gateway.policy.view import ClusterView, InstanceView, ViewState
from gateway.scaling.autoscaler import Autoscaler, Pacing
from gateway.scaling.book import Book
from gateway.scaling.launcher import Launched
from gateway.scaling.operation import Operation, OperationEvent, OperationKind, Phase, Subject
from gateway.scaling.operations import Operations
from gateway.scaling.pools import pools_of
from gateway.scaling.tenure import Tenure
from gateway.settings import GatewaySettings
from migration.leg import InstanceId
from tests.backend.registry.reports import a_report
from tests.gateway.scaling.conftest import scaling_rig

A, B, C = (InstanceId(name) for name in "abc")


def view(name: str, state: ViewState = ViewState.READY, model: str = "m") -> InstanceView:
    return InstanceView(a_report(name, models=(model,)), state, 0.1, 0, 0)


def an_operation(kind: OperationKind, model: str | None = None, **phases: Phase) -> Operation:
    subjects = tuple(Subject(InstanceId(name), phase) for name, phase in phases.items())
    return Operation("op-1", kind, "admin", "", model, subjects)


def states(book: Book, *views: InstanceView) -> dict[str | None, dict[str, str]]:
    pools = pools_of(ClusterView(views), book)
    return {model: {each.id: each.state.value for each in pool.instances} for model, pool in pools.items()}


def test_each_model_is_a_pool() -> None:
    assert states(Book(), view("a"), view("b", model="n"), view("c")) == {"m": {"a": "ready", "c": "ready"}, "n": {"b": "ready"}}


def test_launches_under_way_count_before_they_report() -> None:
    book = Book((an_operation(OperationKind.SCALE_OUT, "m", b=Phase.PENDING, c=Phase.STARTING, d=Phase.CLEARING, e=Phase.WITHDRAWING),))
    assert states(book, view("a"), view("c", ViewState.STARTING)) == {
        "m": {"a": "ready", "b": "starting", "c": "starting", "d": "starting"}
    }


def test_drains_count_from_their_order_to_the_stop() -> None:
    book = Book((an_operation(OperationKind.SCALE_IN, a=Phase.PENDING, b=Phase.DRAINING, c=Phase.STOPPING, d=Phase.RETURNING),))
    seen = states(book, view("a"), view("b", ViewState.DRAINING), view("c", ViewState.DRAINING), view("d", ViewState.DRAINING))
    assert seen == {"m": {"a": "draining", "b": "draining", "d": "ready"}}


def test_what_an_operator_drains_by_hand_is_left_alone() -> None:
    assert states(Book(), view("a"), view("b", ViewState.DRAINING)) == {"m": {"a": "ready"}}


@dataclass
class ScriptedRule:
    """Decides what it is told, once each; then nothing."""

    decisions: list[ScaleDecision]
    seen: list[ScaleView] = field(default_factory=list)

    def decide(self, view: ScaleView) -> tuple[ScaleDecision, ScaleMemory]:
        self.seen.append(view)
        return (self.decisions.pop(0) if self.decisions else ScaleDecision()), view.memory


class KnowingLauncher:
    """Knows some instances."""

    def __init__(self, *names: str) -> None:
        self.known = [Launched(InstanceId(name), "m", order, 1.0) for order, name in enumerate(names)]

    async def list(self) -> list[Launched]:
        return self.known

    async def launch(self, key: InstanceId, model: str | None, fence: int) -> InstanceId:
        raise NotImplementedError

    async def stop(self, instance: InstanceId, fence: int) -> None:
        raise NotImplementedError


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    """An auto-scaler over a store in memory."""

    def __init__(self, rule: Any, *names: str, store: InstanceStore | None = None, holder: str = "g1") -> None:
        self.clock = Clock()
        self.names = iter(range(100))
        self.store = store or MemoryStore(self.clock)
        settings = GatewaySettings(_env_file=None)
        ledger = Ledger(self.store, settings, self.clock, Metrics(CollectorRegistry()))
        self.operations = Operations(
            self.store.records, keep_s=100, store_timeout_s=1, now=lambda: "now", new_name=lambda prefix: f"{prefix}-{next(self.names)}"
        )
        tenure = Tenure(self.store.leases, "autoscaler", holder, ttl_s=15, store_timeout_s=1)
        self.autoscaler = Autoscaler(
            rule, self.operations, KnowingLauncher(*names), ledger, tenure, Pacing(1.0, 60.0), line_tokens=lambda model: 0, clock=self.clock
        )

    async def publish(self, *names: str, **fields: Any) -> None:
        for name in names:
            await self.store.publish(a_report(name, **fields), 1e9)

    async def tick(self, after_s: float = 1.0) -> None:
        self.clock.now_s += after_s
        await self.autoscaler.tick()

    async def ordered(self) -> list[tuple[str, list[str]]]:
        return [(each.kind.value, [subject.instance for subject in each.subjects]) for each in (await self.operations.live()).operations]

    async def end(self, operation: str, *events: OperationEvent) -> None:
        def change(book: Book) -> tuple[Book, None]:
            for event in events:
                subject = book.operations[0].subjects[0].instance
                book = book.changed(operation, lambda each, event=event, subject=subject: each.after(subject, event, ""))  # type: ignore[misc]
            return book, None

        await self.operations.change(change)
        await self.operations.archive(await self.operations.find(operation))


async def test_decisions_become_operations() -> None:
    stage = Stage(ScriptedRule([ScaleDecision(start=2), ScaleDecision(drain=(A,)), ScaleDecision(drain=(C,))]), "a", "b")
    await stage.publish("a", "b", "c")
    for _ in range(4):
        await stage.tick()
    # What the launcher does not know it could not stop.
    assert await stage.ordered() == [("scale_out", ["i-0", "i-1"]), ("scale_in", ["a"])]
    assert all(each.origin == "autoscaler" for each in (await stage.operations.live()).operations)


async def test_a_drain_is_taken_back_through_its_operation() -> None:
    stage = Stage(ScriptedRule([ScaleDecision(undrain=(A,))]), "a")
    await stage.publish("a")
    operation = await stage.operations.order_in([A], "admin")
    await stage.tick()
    assert (await stage.operations.find(operation.id)).subjects[0].phase is Phase.RETURNING


async def test_only_the_holder_of_the_lease_scales() -> None:
    first = Stage(ScriptedRule([ScaleDecision(start=1)]), "a")
    second = Stage(ScriptedRule([ScaleDecision(start=1)]), "a", store=first.store, holder="g2")
    await first.publish("a")
    await first.tick()
    await second.tick()
    assert len(await first.ordered()) == 1


async def test_after_a_failed_start_the_next_one_waits() -> None:
    stage = Stage(ScriptedRule([ScaleDecision(start=1)] * 3), "a")
    await stage.publish("a")
    await stage.tick()
    (operation,) = (await stage.operations.live()).operations
    await stage.end(operation.id, OperationEvent.REFUSED, OperationEvent.GAVE_UP)
    await stage.tick()
    assert await stage.ordered() == []
    await stage.tick(after_s=61.0)
    assert len(await stage.ordered()) == 1


async def test_a_new_holder_begins_with_a_cool_down() -> None:
    stage = Stage(DemandScaling(cool_down_s=10.0), "a", "b")
    await stage.publish("a", "b", free_tokens=1000)
    await stage.tick()
    await stage.tick(9.0)
    assert await stage.ordered() == []
    await stage.tick(2.0)
    assert await stage.ordered() == [("scale_in", ["a"])]
    await stage.tick(20.0)
    assert len(await stage.ordered()) == 1


async def test_a_full_pool_grows_once_for_launches_under_way() -> None:
    stage = Stage(DemandScaling(max_instances=8), "a")
    await stage.publish("a", free_tokens=0, waiting_tokens=1500)
    for _ in range(3):
        await stage.tick()
    assert await stage.ordered() == [("scale_out", ["i-0", "i-1"])]


async def test_an_empty_cluster_is_brought_to_its_least() -> None:
    stage = Stage(DemandScaling(min_instances=2))
    await stage.tick()
    await stage.tick()
    assert await stage.ordered() == [("scale_out", ["i-0", "i-1"])]


async def test_the_papers_rule_by_name() -> None:
    stage = Stage(FreenessRange(hold_s=5.0), "a", "b")
    await stage.publish("a", "b", free_tokens=1000)
    for _ in range(7):
        await stage.tick()
    assert await stage.ordered() == [("scale_in", ["a"])]


async def test_in_a_gateway_switched_on_by_one_setting() -> None:
    async with scaling_rig(autoscale=DemandScaling(min_instances=1)) as scaling:
        async with asyncio.timeout(20):
            while not scaling.launcher.launches:
                await asyncio.sleep(0.005)
        (operation,) = (await scaling.rig.client.get("/admin/operations")).json()["operations"]
        assert (operation["origin"], operation["kind"]) == ("autoscaler", "scale_out")


def test_settings_that_make_no_sense() -> None:
    for given in ({"autoscale": DemandScaling()}, {"autoscale": {"name": "demand", "max_instance": 2}, "launcher_url": "http://x"}):
        with pytest.raises(ValidationError):
            GatewaySettings(_env_file=None, **given)
    assert GatewaySettings(_env_file=None).autoscale is None
