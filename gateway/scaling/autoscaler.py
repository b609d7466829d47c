"""Asks the scaling rule, in whichever gateway holds the lease, and turns its decisions into operations.

Each model is a pool of its own, with a memory of its own. A gateway that has just got the lease has no memory: it counts the moment as the
last change, so that cool-downs hold across gateways. The simulator runs the same rules (gateway/policy/autoscale.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.errors import GatewayError
from gateway.ledger import Ledger
from gateway.policy.autoscale import ScaleDecision, ScaleMemory, ScaleRule, ScaleView
from gateway.policy.view import ClusterView
from gateway.scaling.book import Book
from gateway.scaling.errors import OrderConflict
from gateway.scaling.launcher import Launched, Launcher, LauncherError
from gateway.scaling.operation import OperationKind
from gateway.scaling.operations import Operations
from gateway.scaling.pools import pools_of
from gateway.scaling.tenure import Tenure
from migration.leg import InstanceId

log = logging.getLogger("midstream.gateway.autoscaler")

LEASE = "autoscaler"
ORIGIN = "autoscaler"


@dataclass(frozen=True, slots=True)
class Pacing:
    """Seconds: between two looks; and, once the start of an instance has failed for good, until the next is ordered for that model."""

    interval_s: float
    after_failure_s: float


class Autoscaler:
    """Owned by the app. `line_tokens` wait at this gateway for a place, by model (None: for any); `clock` is monotonic, in seconds."""

    def __init__(
        self,
        rule: ScaleRule,
        operations: Operations,
        launcher: Launcher,
        ledger: Ledger,
        tenure: Tenure,
        pacing: Pacing,
        *,
        line_tokens: Callable[[str | None], int],
        clock: Callable[[], float],
    ) -> None:
        self._rule = rule
        self._operations = operations
        self._launcher = launcher
        self._ledger = ledger
        self._tenure = tenure
        self._pacing = pacing
        self._line_tokens = line_tokens
        self._clock = clock
        self._token: int | None = None
        self._memories: dict[str | None, ScaleMemory] = {}
        self._ordered: dict[str | None, str] = {}
        self._not_before_s: dict[str | None, float] = {}

    async def keep(self) -> None:
        """Tick, for ever."""
        try:
            while True:
                try:
                    await self.tick()
                except (GatewayError, LauncherError) as error:
                    log.warning("scaling has to wait: %s", error)
                except Exception:  # the root of a task; one bad round must not end scaling
                    log.exception("a round of scaling failed")
                await asyncio.sleep(self._pacing.interval_s)
        finally:
            await self._tenure.give_back()

    async def tick(self) -> None:
        """One look at every pool. Raises StoreDown, LauncherError."""
        lease = await self._tenure.hold()
        now_s = self._clock()
        if lease is None:
            self._token = None
            return
        if lease.token != self._token:
            self._token = lease.token
            self._memories.clear()
        launched = {each.instance: each for each in await self._launcher.list()}
        cluster, book = await self._ledger.view(0.0), await self._operations.live()
        pools = pools_of(cluster, book) or {None: ClusterView()}
        self._memories = {model: known for model, known in self._memories.items() if model in pools}
        for model, pool in pools.items():
            memory = self._memories.get(model, ScaleMemory(changed_s=now_s))
            view = ScaleView(pool, now_s, self._line_tokens(model), memory)
            decision, self._memories[model] = self._rule.decide(view)
            await self._carry_out(decision, model, book, launched, now_s)

    async def _carry_out(
        self, decision: ScaleDecision, model: str | None, book: Book, launched: Mapping[InstanceId, Launched], now_s: float
    ) -> None:
        for instance in decision.undrain:
            operation = book.of_instance(instance)
            if operation is not None and operation.kind is OperationKind.SCALE_IN:
                log.info("%s is needed after all", instance)
                try:
                    await self._operations.cancel(operation.id)
                except OrderConflict as error:
                    log.info("too late for %s: %s", instance, error.message)
        if decision.start and await self._may_start(model, now_s):
            log.info("starting %d instance(s) of %s", decision.start, model or "the default model")
            self._ordered[model] = (await self._operations.order_out(decision.start, model, ORIGIN)).id
        drain = [instance for instance in decision.drain if instance in launched and launched[instance].stoppable]
        if drain:
            log.info("stopping %s", ", ".join(drain))
            await self._operations.order_in(drain, ORIGIN)

    async def _may_start(self, model: str | None, now_s: float) -> bool:
        """Not for a while after the last start has failed in all its attempts."""
        last = self._ordered.pop(model, None)
        if last is not None and (await self._operations.find(last)).state == "failed":
            log.warning("operation %s failed; the next start of %s waits %g s", last, model, self._pacing.after_failure_s)
            self._not_before_s[model] = now_s + self._pacing.after_failure_s
        return self._not_before_s.get(model, now_s) <= now_s
