import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.reporter import Reporter
from backend.llumlet.settings import LlumletSettings
from backend.registry.instance import InstanceState, LoadReport
from backend.registry.memory import MemoryStore
from backend.registry.store import StoreError
from migration.leg import InstanceId
from tests.backend.llumlet.live import wait_until
from tests.backend.llumlet.scripted_engine import ScriptedEngine

NEVER_S = 1000.0


class Store(MemoryStore):
    """Notes when reports came, and fails when told to."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        super().__init__(self.now)
        self.reports: list[LoadReport] = []
        self.times: list[float] = []
        self.failing = False
        self.silent = False

    async def publish(self, report: LoadReport, ttl_s: float, *, urgent: bool = False) -> None:
        self.reports.append(report)
        self.times.append(self.now())
        if self.failing:
            raise StoreError("down")
        if self.silent:
            await asyncio.Event().wait()
        await super().publish(report, ttl_s)

    async def withdraw(self, instance: InstanceId) -> None:
        if self.failing:
            raise StoreError("down")
        await super().withdraw(instance)


@asynccontextmanager
async def reporting(engine: ScriptedEngine, store: Store, **knobs: float) -> AsyncIterator[Reporter]:
    settings = LlumletSettings.model_validate({"instance_id": "i1", "advertised_url": "http://i1", **knobs})
    reporter = Reporter(
        engine, store, settings, LlumletMetrics(), incarnation="x", state=lambda: InstanceState.DRAINING, moves=lambda: (2, 3)
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reporter.run())
        try:
            await wait_until(lambda: store.reports)
            yield reporter
        finally:
            task.cancel()


async def test_a_report_says_who_and_where() -> None:
    store = Store()
    async with reporting(ScriptedEngine(), store):
        (sighting,) = await store.sightings()
    report = sighting.report
    assert (report.instance, report.incarnation, report.sequence, report.url) == ("i1", "x", 1, "http://i1")
    assert (report.state, report.migrations_in, report.migrations_out) == (InstanceState.DRAINING, 2, 3)
    assert await store.sightings() == []  # withdrawn at the end


async def test_there_is_a_heartbeat() -> None:
    store = Store()
    async with reporting(ScriptedEngine(), store, report_heartbeat_s=0.01, report_interval_s=0.001):
        await wait_until(lambda: len(store.reports) >= 4)
    assert [report.sequence for report in store.reports[:4]] == [1, 2, 3, 4]


async def test_urgent_changes_go_out_at_once() -> None:
    store, engine = Store(), ScriptedEngine()
    async with reporting(engine, store, report_heartbeat_s=NEVER_S, report_interval_s=NEVER_S, report_urgent_interval_s=0.02):
        engine.load_changed(False)
        engine.load_changed(True)
        engine.load_changed(True)
        await wait_until(lambda: len(store.reports) == 2)
    assert store.times[1] - store.times[0] >= 0.019


async def test_other_changes_wait_for_the_interval_and_are_joined() -> None:
    store, engine = Store(), ScriptedEngine()
    async with reporting(engine, store, report_heartbeat_s=NEVER_S, report_interval_s=0.1, report_urgent_interval_s=0.0):
        for _ in range(10):
            engine.load_changed(False)
            await asyncio.sleep(0)
        await wait_until(lambda: len(store.reports) == 2)
        assert store.times[1] - store.times[0] >= 0.099
        engine.load_changed(False)
        await wait_until(lambda: len(store.reports) == 3)
    assert store.times[2] - store.times[1] >= 0.099


@pytest.mark.parametrize("fault", ["failing", "silent"])
async def test_a_store_that_fails_is_tried_again_and_named_once(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    store, engine = Store(), ScriptedEngine()
    setattr(store, fault, True)
    with caplog.at_level(logging.INFO, "backend.llumlet.reporter"):
        async with reporting(engine, store, report_heartbeat_s=0.01, report_interval_s=0.01, store_timeout_s=0.01):
            await wait_until(lambda: len(store.reports) >= 4)
            setattr(store, fault, False)
            count = len(store.reports)
            await wait_until(lambda: len(store.reports) >= count + 2)
            assert len(await store.sightings()) == 1
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "the shared store does not take reports",
        "the shared store takes reports again",
    ]


async def test_leaving_does_not_need_the_store() -> None:
    store = Store()
    store.failing = True
    async with reporting(ScriptedEngine(), store):
        pass
