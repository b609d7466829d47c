"""The joint of two streams: told once the client has seen the first event after it, whether its request moved or was resumed."""

from gateway.composition import Composition
from migration.leg import InstanceId, Leg


async def tell_joint(
    parts: Composition, leg: Leg, source: InstanceId, destination: InstanceId, gap_s: float, resumed_after: str | None
) -> None:
    """To the metrics, to those who listen to events, and to the store. `resumed_after`: the failure; None for a move."""
    told: dict[str, object] = {"request": leg.request, "epoch": leg.epoch, "source": source, "destination": destination}
    told["gap_ms"] = round(gap_s * 1e3, 3)
    parts.metrics.switch_gap_s.observe(gap_s)
    if resumed_after is None:
        parts.events.publish("switch", told)
    else:
        parts.events.publish("resume", {**told, "reason": resumed_after})
        parts.metrics.resumes.outcomes.labels("resumed", resumed_after).inc()
    await parts.ledger.record_switch(leg, gap_s * 1e3)
