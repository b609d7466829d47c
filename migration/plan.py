"""PURE. What a rebalancer (or a person) asks for, and what came of it."""

from dataclasses import dataclass
from enum import StrEnum

from migration.leg import InstanceId, RequestId


class MigrationMode(StrEnum):
    """How the KV cache gets to the destination. `live` is the product; the others are what it is measured against."""

    LIVE = "live"
    """Copy complete blocks in stages while decoding goes on; only the last stage stops the request."""
    STOP_COPY = "stop_copy"
    """Freeze first, then copy everything."""
    RECOMPUTE = "recompute"
    """Freeze, send the tokens only; the destination computes the KV cache again."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where to: the instance's id and the base URL of its llumlet (and of its OpenAI server), without a trailing slash."""

    instance: InstanceId
    url: str


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """One order to a source llumlet: move this request there."""

    request: RequestId
    destination: Destination
    mode: MigrationMode = MigrationMode.LIVE
    only_waiting: bool = False
    """Leave it where it is once it has memory: it was to move because it waits."""


class MigrationResult(StrEnum):
    """How a migration ended. Every value but `moved` leaves the request where it was, or ended there."""

    MOVED = "moved"
    REFUSED = "refused"
    """The destination said no (see the reason)."""
    UNMOVABLE = "unmovable"
    """The source cannot move this request exactly (see the reason)."""
    ENDED = "ended"
    """The request finished, or its client left, before the hand-over."""
    FAILED = "failed"
    """A link, a channel or a deadline failed; the source went on."""
    LOST = "lost"
    """The destination stayed silent after COMMIT; the source gave the request up so that there are never two owners.
    (Or the source's own engine could not put the request back into its batch.)"""


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """The answer to a MigrationPlan.

    `bytes` and `stages` count what was copied (0 for a waiting or recomputed request); `frozen_ms` is the time from the freeze to
    the destination's COMMITTED as the source saw it.
    """

    result: MigrationResult
    reason: str
    epoch: int
    stages: int = 0
    bytes: int = 0
    frozen_ms: float = 0.0
    total_ms: float = 0.0
