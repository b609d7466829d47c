"""Orders a move from the instance that runs the request, and says how it ended, to the event feed too."""

import asyncio

from gateway.composition import Composition
from gateway.errors import GatewayError, UpstreamBroken
from gateway.policy.view import InstanceView
from migration.leg import Leg
from migration.plan import MigrationOutcome, MigrationPlan, MigrationResult

SWITCH_POLL_S = 0.02


async def move(parts: Composition, plan: MigrationPlan, source: InstanceView) -> dict[str, object]:
    """Move one request; returns, when it is over, what /admin/migrations answers. Raises UpstreamFailed."""
    told = {"request": plan.request, "source": source.id, "destination": plan.destination.instance, "mode": plan.mode.value}
    parts.events.publish("migration_ordered", told)
    try:
        outcome = await _carry_out(parts, plan, source)
    except GatewayError as error:
        parts.events.publish("migration_ended", {"outcome": error.reason, "result": MigrationResult.FAILED.value, **told})
        raise
    moved = outcome.result is MigrationResult.MOVED
    ended: dict[str, object] = {
        "outcome": outcome.result.value if moved else outcome.reason or outcome.result.value,
        "result": outcome.result.value,
        **told,
        "stages": outcome.stages,
        "bytes": outcome.bytes,
        "downtime_ms": await _wait_downtime(parts, Leg(plan.request, outcome.epoch)) if moved else None,
        "frozen_ms": outcome.frozen_ms,
        "total_ms": outcome.total_ms,
    }
    parts.events.publish("migration_ended", ended)
    return ended


async def _carry_out(parts: Composition, plan: MigrationPlan, source: InstanceView) -> MigrationOutcome:
    """Order the migration from the source. Raises UpstreamFailed."""
    question = {
        "request": plan.request,
        "destination": {"instance": plan.destination.instance, "url": plan.destination.url},
        "mode": plan.mode.value,
    }
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
