"""PURE. What a policy sees: one request, and the cluster at one moment, put together from reports, their ages and the claims."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from backend.registry.instance import InstanceKind, InstanceState, LoadReport
from backend.registry.store import Sighting
from migration.leg import InstanceId, RequestId


class ViewState(StrEnum):
    """An instance as a reader judges it."""

    READY = "ready"
    DRAINING = "draining"
    STARTING = "starting"
    STALE = "stale"
    """Says it is ready, but has not said so for a while."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that wants a place."""

    request: RequestId
    model: str | None
    """None: any model will do."""
    tier: str
    prompt_tokens: int
    excluded: frozenset[InstanceId] = frozenset()
    """Instances that have failed it already, or that it must leave."""
    sequence: int | None = None
    """Its number in the order of arrival, if whoever asks counts."""
    expected_output_tokens: float = 256.0
    """How long answers are at present, in the mean."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance. `claims` counts live requests on it over all gateways, as far as known."""

    report: LoadReport
    state: ViewState
    age_s: float
    claims: int
    claimed_tokens: int

    @property
    def id(self) -> InstanceId:
        return self.report.instance

    @property
    def is_member(self) -> bool:
        """It has a llumlet beside it, and shares the fleet's secret; a plain OpenAI server does not."""
        return self.report.kind is not InstanceKind.PASSIVE

    @property
    def can_move(self) -> bool:
        """True if it can give and take running requests."""
        return self.is_member

    def serves(self, model: str | None) -> bool:
        """True if a request for that model can go here."""
        return model is None or model in self.report.models


@dataclass(frozen=True, slots=True)
class Drift:
    """Claims that have come to an instance (or gone: negative) since the store was asked, and their tokens."""

    claims: int = 0
    tokens: int = 0

    def plus(self, claims: int, tokens: int) -> "Drift":
        """With so many more."""
        return Drift(self.claims + claims, self.tokens + tokens)


NO_DRIFT = Drift()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances, ordered by id."""

    instances: tuple[InstanceView, ...] = ()

    def find(self, instance: InstanceId) -> InstanceView | None:
        """That instance, if it is there."""
        return next((view for view in self.instances if view.id == instance), None)

    def without(self, instances: Collection[InstanceId]) -> "ClusterView":
        """The others."""
        return ClusterView(tuple(view for view in self.instances if view.id not in instances))

    def knows_model(self, model: str | None) -> bool:
        """True if any instance, in whatever state, serves the model."""
        return any(view.serves(model) for view in self.instances)


def assemble(sightings: Iterable[Sighting], report_stale_s: float, aged_s: float, drift: Mapping[InstanceId, Drift]) -> ClusterView:
    """A view of what the store said `aged_s` seconds ago, with the claims that have come (or gone: negative) since then."""
    views = [view_of(sighting, report_stale_s, aged_s, drift.get(sighting.report.instance, NO_DRIFT)) for sighting in sightings]
    return ClusterView(tuple(sorted(views, key=lambda view: view.report.instance)))


def view_of(sighting: Sighting, report_stale_s: float, aged_s: float, drift: Drift) -> InstanceView:
    """One instance of `assemble`."""
    age_s = sighting.age_s + aged_s
    claims, tokens = max(0, sighting.claims + drift.claims), max(0, sighting.claimed_tokens + drift.tokens)
    return InstanceView(sighting.report, _state(sighting, age_s > report_stale_s), age_s, claims, tokens)


def _state(sighting: Sighting, is_stale: bool) -> ViewState:
    match sighting.report.state:
        case InstanceState.DRAINING:
            return ViewState.DRAINING
        case InstanceState.STARTING:
            return ViewState.STARTING
        case InstanceState.READY:
            return ViewState.STALE if is_stale else ViewState.READY
