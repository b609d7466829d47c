"""One migration at the source, from the order to exactly one end.

The loop: perform an action, translate what came of it into an event, look the next action up in SOURCE_TABLE. Actions race against the
request's end, so that a client that leaves ends the migration at once, whatever it is waiting for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from migration.departure import Announcement, Departure
from migration.errors import LinkError, MigrationError, PeerGone, Refused, RequestEnded, Unmovable
from migration.pair import Pair
from migration.plan import MigrationOutcome, MigrationResult
from migration.ports import Link, SourceEngine
from migration.protocol import (
    RESULT_OF,
    SOURCE_BEFORE_COMMIT,
    SOURCE_START,
    SOURCE_TABLE,
    SOURCE_TERMINAL,
    SourceAction,
    SourceEvent,
    SourceState,
    source_step,
)
from migration.settings import SessionSettings
from migration.source import Source

_logger = logging.getLogger(__name__)

_CLEANING = frozenset({SourceState.THAWING, SourceState.CANCELLING})
"""States whose actions are finished whatever else happens."""


async def run_migration(
    departure: Departure,
    *,
    engine: SourceEngine,
    link: Link,
    announce: Callable[[Announcement], Awaitable[None]],
    settings: SessionSettings,
    clock: Callable[[], float],
    pair: Pair,
) -> MigrationOutcome:
    """Move the request and say how it ended. Raises nothing but CancelledError.

    Cancelled once, it puts everything back before it raises (within the deadlines of `settings`); cancelled twice, it does not.
    `announce` should not wait for the client: an announcement is bounded by message_timeout_s, and one that fails is only logged.
    """
    started_s = clock()
    outcome = MigrationOutcome(MigrationResult.FAILED, "internal", departure.leg.epoch)
    for fresh in (False, True):
        source = Source(departure, engine=engine, link=link, announce=announce, settings=settings, clock=clock, pair=pair, fresh=fresh)
        outcome = await MigrationSession(departure, engine, source, started_s, clock).run()
        if outcome.reason != "channel_unknown":
            break
    return outcome


class MigrationSession:
    """One attempt."""

    def __init__(self, departure: Departure, engine: SourceEngine, source: Source, started_s: float, clock: Callable[[], float]) -> None:
        self._departure = departure
        self._engine = engine
        self._source = source
        self._started_s = started_s
        self._clock = clock
        self._abandoned = asyncio.Event()
        self._blame: tuple[MigrationResult, str] | None = None
        self._reason = ""

    async def run(self) -> MigrationOutcome:
        """To the end; on cancellation, to the end of the cleaning up."""
        async with asyncio.TaskGroup() as group:
            driving = group.create_task(self._drive())
            try:
                await asyncio.wait([driving])
            except asyncio.CancelledError:
                self._abandoned.set()
                await asyncio.wait([driving])
                raise
        return driving.result()

    async def _drive(self) -> MigrationOutcome:
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(self._wait_ended())
            abandoned = group.create_task(_wait_set(self._abandoned))
            state, action = SOURCE_START
            event = SourceEvent.MOVABLE
            while state not in SOURCE_TERMINAL:
                event = await self._race(group, state, action, ended, abandoned)
                if self._blame is None and event in RESULT_OF:
                    self._blame = RESULT_OF[event], self._reason or event
                state, action = source_step(state, event)
            self._source.release_order()
            outcome = await self._finish(state, event, has_ended=ended.done())
            ended.cancel()
            abandoned.cancel()
        return outcome

    async def _race(
        self, group: asyncio.TaskGroup, state: SourceState, action: SourceAction, ended: asyncio.Task[None], abandoned: asyncio.Task[None]
    ) -> SourceEvent:
        performing = group.create_task(self._perform(state, action))
        rivals = set() if state in _CLEANING else {ended, abandoned} if state in SOURCE_BEFORE_COMMIT else {ended}
        await asyncio.wait({performing, *rivals}, return_when=asyncio.FIRST_COMPLETED)
        if not performing.done():
            performing.cancel()
            await asyncio.wait({performing})
        if not performing.cancelled():
            return performing.result()
        if ended.done():
            return self._because(SourceEvent.ENDED, RequestEnded.reason)
        return self._because(SourceEvent.FAILED, "cancelled")

    async def _perform(self, state: SourceState, action: SourceAction) -> SourceEvent:
        try:
            return await self._source.perform(action)
        except MigrationError as error:
            event, reason = _event(error), error.reason
        except TimeoutError:
            event, reason = SourceEvent.FAILED, "timeout"
        except Exception:
            _logger.exception("%s: unexpected error in %s", self._departure.leg, action)
            event, reason = SourceEvent.FAILED, "internal"
        # Once Commit may have been sent, whatever goes wrong leaves the leg's fate unknown.
        return self._because(event if (state, event) in SOURCE_TABLE else _fallback(state), reason)

    async def _wait_ended(self) -> None:
        try:
            await self._engine.wait_ended(self._departure.leg)
        except RequestEnded:
            return

    def _because(self, event: SourceEvent, reason: str) -> SourceEvent:
        self._reason = reason
        return event

    async def _finish(self, state: SourceState, event: SourceEvent, *, has_ended: bool) -> MigrationOutcome:
        result, reason = self._blame or (MigrationResult.FAILED, "internal")
        if (result, reason) == (MigrationResult.REFUSED, "dropped") and has_ended:
            # The gateway hung up on both sides, and the destination heard it first.
            result, reason = MigrationResult.ENDED, RequestEnded.reason
        if state is SourceState.MOVED:
            await self._source.hand_over()
            result, reason = MigrationResult.MOVED, ""
        elif state is SourceState.LOST:
            reason = "unresolved" if event is SourceEvent.UNRESOLVED else "not_thawed"
            await self._source.give_up(reason)
            result = MigrationResult.LOST
        return MigrationOutcome(
            result=result,
            reason=reason,
            epoch=self._source.new_leg.epoch,
            stages=self._source.stages,
            bytes=self._source.bytes,
            frozen_ms=self._source.frozen_ms,
            total_ms=(self._clock() - self._started_s) * 1000,
        )


async def _wait_set(event: asyncio.Event) -> None:
    await event.wait()


def _event(error: MigrationError) -> SourceEvent:
    match error:
        case RequestEnded():
            return SourceEvent.ENDED
        case Unmovable():
            return SourceEvent.UNMOVABLE
        case Refused():
            return SourceEvent.REFUSED
        case PeerGone():
            return SourceEvent.GONE
        case LinkError():
            return SourceEvent.SILENT
    return SourceEvent.FAILED


def _fallback(state: SourceState) -> SourceEvent:
    return SourceEvent.FAILED if (state, SourceEvent.FAILED) in SOURCE_TABLE else SourceEvent.SILENT
