"""Orders a move from the instance that runs the request, and says how it ended: to the event feed and the metrics too."""

import asyncio

from gateway.composition import Composition
from gateway.errors import GatewayError, UpstreamBroken
from gateway.policy.view import InstanceView
from migration.leg import Leg
from migration.plan import MigrationOutcome, MigrationPlan, MigrationResult

SWITCH_POLL_S = 0.02

ORDERED = "order"
"""The reason of moves that a person asked for."""


async def move(parts: Composition, plan: MigrationPlan, source: InstanceView) -> dict[str, object]:
    """Move one request; returns, when it is over, what /admin/migrations answers. Raises UpstreamFailed."""
    return await conclude(parts, plan, source, await order(parts, plan, source))


async def order(
    parts: Composition, plan: MigrationPlan, source: InstanceView, *, reason: str = ORDERED, token: int | None = None
) -> MigrationOutcome:
    """Order a move and wait until it is over. `token` is the orderer's fencing token. Raises UpstreamFailed."""
    told = _told(plan, source, reason)
    parts.events.publish("migration_ordered", told)
    try:
        outcome = await _carry_out(parts, plan, source, token)
    except GatewayError as error:
        parts.metrics.moves.ended.labels(error.reason, reason).inc()
        parts.events.publish("migration_ended", {"outcome": error.reason, "result": MigrationResult.FAILED.value, **told})
        raise
    parts.metrics.moves.note(outcome, reason)
    return outcome


async def conclude(
    parts: Composition, plan: MigrationPlan, source: InstanceView, outcome: MigrationOutcome, *, reason: str = ORDERED
) -> dict[str, object]:
    """Wait for what the client noticed, and tell the event feed; returns what it was told."""
    moved = outcome.result is MigrationResult.MOVED
    downtime_ms = await _wait_downtime(parts, Leg(plan.request, outcome.epoch)) if moved else None
    if downtime_ms is not None:
        parts.metrics.moves.downtime_s.labels(reason).observe(downtime_ms / 1e3)
    ended: dict[str, object] = {
        "outcome": outcome.result.value if moved else outcome.reason or outcome.result.value,
        "result": outcome.result.value,
        **_told(plan, source, reason),
        "stages": outcome.stages,
        "bytes": outcome.bytes,
        "downtime_ms": downtime_ms,
        "frozen_ms": outcome.frozen_ms,
        "total_ms": outcome.total_ms,
    }
    parts.events.publish("migration_ended", ended)
    return ended


def _told(plan: MigrationPlan, source: InstanceView, reason: str) -> dict[str, object]:
    place = {"source": source.id, "destination": plan.destination.instance}
    return {"request": plan.request, **place, "mode": plan.mode.value, **({} if reason == ORDERED else {"reason": reason})}


async def _carry_out(parts: Composition, plan: MigrationPlan, source: InstanceView, token: int | None) -> MigrationOutcome:
    """Order the migration from the source. Raises UpstreamFailed."""
    question: dict[str, object] = {
        "request": plan.request,
        "destination": {"instance": plan.destination.instance, "url": plan.destination.url},
        "mode": plan.mode.value,
    }
    if token is not None:
        question |= {"token": token, "only_waiting": plan.only_waiting}
    raw = await parts.upstream.post_json(f"{source.report.url}/midstream/migrations", question, parts.settings.migration_timeout_s)
    match raw:
        case {"result": str(result), "reason": str(reason), "epoch": int(epoch), **rest} if result in list(MigrationResult):
            stages, size, frozen_ms, total_ms = (rest.get(key, 0) for key in ("stages", "bytes", "frozen_ms", "total_ms"))
            if (
                isinstance(stages, int)
                and isinstance(size, int)
                and isinstance(frozen_ms, int | float)
                and isinstance(total_ms, int | float)
            ):
                return MigrationOutcome(MigrationResult(result), reason, epoch, stages, size, frozen_ms, total_ms)
    raise UpstreamBroken("The instance's answer is not a migration's outcome.")


async def _wait_downtime(parts: Composition, leg: Leg) -> float | None:
    """The gap that the relay of the request measured at its client; None if it has not told within the bound."""
    try:
        async with asyncio.timeout(parts.settings.switch_wait_s):
            while True:
                gap_ms = await parts.ledger.switch_gap_ms(leg)
                if gap_ms is not None:
                    return round(gap_ms, 3)
                await asyncio.sleep(SWITCH_POLL_S)
    except TimeoutError:
        return None
