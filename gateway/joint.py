"""The joint of two streams: told once the client has seen the first event after it, whether its request moved or was resumed."""

from collections.abc import Coroutine
from typing import Any

from gateway.composition import Composition
from migration.leg import InstanceId, Leg


class Joint:
    """Owned by one relay, which says what the client was last shown, when and by whom; and when its stream is about to go on elsewhere."""

    def __init__(self, now_s: float) -> None:
        self.shown_at_s = now_s
        """When the client was last shown an event."""
        self._shown_by = InstanceId("")
        self.leg: Leg | None = None
        """The leg whose first event is awaited, if one is."""

    def show(self, now_s: float, instance: InstanceId) -> None:
        """The client is shown an event of that instance."""
        self.shown_at_s, self._shown_by = now_s, instance

    def tell(
        self, parts: Composition, leg: Leg, now_s: float, instance: InstanceId, resumed_after: str | None
    ) -> Coroutine[Any, Any, None]:
        """To be awaited: that leg's first event has come from that instance, to be shown next."""
        self.leg = None
        return _tell(parts, leg, self._shown_by, instance, now_s - self.shown_at_s, resumed_after)


async def _tell(parts: Composition, leg: Leg, source: InstanceId, destination: InstanceId, gap_s: float, resumed_after: str | None) -> None:
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
