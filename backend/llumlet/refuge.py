"""PURE. Where a draining instance sends a request: to the freest other instance that is ready, serves the model and has room for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from backend.registry.instance import InstanceState
from backend.registry.store import Sighting
from migration.leg import InstanceId
from migration.plan import Destination


@dataclass(frozen=True, slots=True)
class Coming:
    """What this instance is sending to another one right now."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refuge:
    """An instance that takes requests in, as it was reported."""

    destination: Destination
    free_tokens: int
    """What neither running nor waiting requests use."""
    requests: int
    block_tokens: int

    def freeness(self, coming: Coming) -> float:
        """Free tokens per request, with what is coming there."""
        return (self.free_tokens - coming.tokens) / max(1, self.requests + coming.requests)


def refuges(sightings: Iterable[Sighting], here: InstanceId, models: Sequence[str], max_age_s: float) -> Sequence[Refuge]:
    """The instances that may take requests of `here`, which serves `models`. Reports older than `max_age_s` are not believed."""
    return tuple(
        Refuge(
            Destination(sighting.report.instance, sighting.report.url),
            sighting.report.free_tokens - sighting.report.waiting_tokens,
            max(sighting.claims, sighting.report.running + sighting.report.waiting),
            sighting.report.block_tokens,
        )
        for sighting in sightings
        if sighting.report.state is InstanceState.READY
        and sighting.report.instance != here
        and sighting.age_s <= max_age_s
        and not set(models).isdisjoint(sighting.report.models)
    )


def choose_refuge(
    tokens: int, among: Sequence[Refuge], coming: Mapping[InstanceId, Coming], limit: int, avoid: InstanceId | None
) -> Refuge | None:
    """Where a request with that much context goes, if anywhere now. At most `limit` are on their way to one instance at a time.

    `avoid` failed it last time: it is chosen only if there is no other.
    """
    nobody = Coming()

    def has_room(refuge: Refuge) -> bool:
        there = coming.get(refuge.destination.instance, nobody)
        return there.requests < limit and refuge.free_tokens - there.tokens >= tokens + refuge.block_tokens

    open_ = [refuge for refuge in among if has_room(refuge)]
    best = [refuge for refuge in open_ if refuge.destination.instance != avoid] or open_
    return max(
        best,
        key=lambda refuge: (refuge.freeness(coming.get(refuge.destination.instance, nobody)), refuge.destination.instance),
        default=None,
    )
