"""PURE. What a session has to know of the request it moves, and what it tells the request's client side."""

from collections.abc import Callable
from dataclasses import dataclass

from migration.leg import InstanceId, Leg
from migration.messages import HttpRequest
from migration.plan import MigrationPlan


@dataclass(frozen=True, slots=True)
class Departure:
    """One order, and the request it is about."""

    plan: MigrationPlan
    source: InstanceId
    """This instance."""
    leg: Leg
    """The request's current leg, here."""
    new_leg: Callable[[], Leg]
    """Answers a leg with a higher epoch than any tried before for this request: an epoch that was announced and came to nothing is
    void for ever, so that what is left of an old attempt cannot be taken for the new one. Called once an attempt."""
    http: HttpRequest
    created: Callable[[], int | None]
    """The `created` second the client has been shown by now, if any."""
    tier: str = "normal"
    prefill: Callable[[], tuple[int, int] | None] = lambda: None
    """What the engine has told of its prefill by now (Prepare.prefill)."""


@dataclass(frozen=True, slots=True)
class Moving:
    """The request is about to move there: attach now."""

    epoch: int
    instance: InstanceId
    url: str


@dataclass(frozen=True, slots=True)
class Kept:
    """It stays after all; the epoch is void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Moved:
    """It has moved: nothing more may be sent from here."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """This side has given the request up without knowing what became of it."""

    epoch: int
    reason: str


Announcement = Moving | Kept | Moved | Lost
