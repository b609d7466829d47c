"""Publishes the instance's load: at once when it matters, seldom enough not to cost anything, and always often enough to be believed.

urgent change ──> at once, but at least report_urgent_interval_s after the last report
other change  ──> at least report_interval_s after it
no change     ──> report_heartbeat_s after it
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from backend.engine.base import Engine
from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.settings import LlumletSettings
from backend.registry.instance import InstanceState, LoadReport
from backend.registry.store import InstanceStore, StoreError
from migration.leg import InstanceId

log = logging.getLogger(__name__)


class Reporter:
    """One instance's reports, in one incarnation. `state` and `moves` (migrations in, out) are asked for at each report."""

    def __init__(
        self,
        engine: Engine,
        store: InstanceStore,
        settings: LlumletSettings,
        metrics: LlumletMetrics,
        *,
        incarnation: str,
        state: Callable[[], InstanceState],
        moves: Callable[[], tuple[int, int]],
    ) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._incarnation = incarnation
        self._state = state
        self._moves = moves
        self._sequence = 0
        self._told_state: InstanceState | None = None
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._store_failing = False

    def report(self) -> LoadReport:
        """The load right now. Does not count as published."""
        arriving, leaving = self._moves()
        return replace(
            self._engine.load(),
            instance=InstanceId(self._settings.instance_id),
            incarnation=self._incarnation,
            sequence=self._sequence,
            url=self._settings.advertised_url,
            state=self._state(),
            migrations_in=arriving,
            migrations_out=leaving,
        )

    def changed(self, urgent: bool) -> None:
        """The load is another than at the last report."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Publish until cancelled; then withdraw."""
        self._engine.watch_load(self.changed)
        loop = asyncio.get_running_loop()
        try:
            while True:
                urgent = self._urgent.is_set()
                self._changed.clear()
                self._urgent.clear()
                published_s = loop.time()
                await self._publish(urgent)
                await self._wait_due(published_s)
        finally:
            await self._withdraw()

    async def _wait_due(self, published_s: float) -> None:
        await asyncio.sleep(self._settings.report_urgent_interval_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(published_s + self._settings.report_heartbeat_s):
                await self._changed.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(published_s + self._settings.report_interval_s):
                await self._urgent.wait()

    async def _publish(self, urgent: bool) -> None:
        self._sequence += 1
        report = self.report()
        told, self._told_state = self._told_state, report.state
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                await self._store.publish(report, self._settings.report_ttl_s, urgent=urgent or report.state is not told)
        except (StoreError, TimeoutError) as error:
            self._metrics.store_failures.inc()
            if not self._store_failing:
                log.warning("the shared store does not take reports (%r); trying on", error)
            self._store_failing = True
        else:
            if self._store_failing:
                log.info("the shared store takes reports again")
            self._store_failing = False

    async def _withdraw(self) -> None:
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                await self._store.withdraw(InstanceId(self._settings.instance_id))
        except (StoreError, TimeoutError) as error:
            log.warning("could not withdraw from the shared store (%r)", error)
