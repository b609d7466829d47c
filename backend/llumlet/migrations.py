"""Migrations away from this instance: at most one per request at a time, each run to exactly one end whoever ordered it stays or not."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from backend.engine.base import Engine
from backend.engine.flight import Flight
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import Flights
from backend.llumlet.link import Links
from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.settings import LlumletSettings
from backend.llumlet.wire import kept_event, lost_event, moved_event, moving_event
from migration.departure import Announcement, Departure, Kept, Lost, Moved, Moving
from migration.leg import InstanceId, RequestId
from migration.pair import Pair
from migration.plan import MigrationOutcome, MigrationPlan, MigrationResult
from migration.session import run_migration

log = logging.getLogger(__name__)


FIRST_GUESS_S = 0.5
"""What a move takes, as long as none has been made from here."""
GUESS_WEIGHT = 0.2
"""Of the latest move, in the running mean of what they take."""
STAYED_KEPT_S = 60.0


class UnknownRequest(Exception):
    """No such request is being served here."""


class Migrations:
    """Runs them in `tasks`. `clock` is monotonic, in seconds; `changed` hears of each beginning and end."""

    def __init__(
        self,
        engine: Engine,
        flights: Flights,
        links: Links,
        settings: LlumletSettings,
        metrics: LlumletMetrics,
        *,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._flights = flights
        self._links = links
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._changed = changed
        self._moving: dict[RequestId, asyncio.Task[MigrationOutcome]] = {}
        self._stayed: dict[RequestId, float] = {}
        self.usual_s = FIRST_GUESS_S
        """What a move away from here takes, in the mean."""
        self._pairs: dict[InstanceId, Pair] = {}

    def __len__(self) -> int:
        return len(self._moving)

    def is_moving(self, request: RequestId) -> bool:
        return request in self._moving

    def stayed_since_s(self, request: RequestId) -> float:
        """When a move of the request last came to nothing here; -inf if none did in the last minute."""
        return self._stayed.get(request, float("-inf"))

    def cancel_all(self) -> None:
        """Stop them all: each puts back what it can before it ends."""
        for task in self._moving.values():
            task.cancel()

    async def stop(self) -> None:
        """The same, and wait until they have ended."""
        self.cancel_all()
        if self._moving:
            await asyncio.wait(tuple(self._moving.values()))

    async def run(self, plan: MigrationPlan) -> MigrationOutcome:
        """Carry the order out and say how it ended. Raises UnknownRequest. Cancelling the caller does not stop a migration."""
        exchange = self._flights.latest(plan.request)
        if exchange is None:
            raise UnknownRequest(f"{plan.request} is not being served here")
        refusal = self._refuse(plan, exchange.flight)
        if refusal is not None:
            self._metrics.count(refusal)
            return refusal
        task = self._moving[plan.request] = self._tasks.create_task(self._migrate(plan, exchange))
        task.add_done_callback(lambda _: self._over(plan.request))
        self._changed()
        await asyncio.wait([task])
        return task.result()

    def _over(self, request: RequestId) -> None:
        del self._moving[request]
        self._changed()

    def _refuse(self, plan: MigrationPlan, flight: Flight) -> MigrationOutcome | None:
        epoch = flight.leg.epoch
        if plan.destination.instance == self._settings.instance_id:
            return MigrationOutcome(MigrationResult.REFUSED, "same_instance", epoch)
        if plan.request in self._moving:
            return MigrationOutcome(MigrationResult.REFUSED, "already_moving", epoch)
        if len(self._moving) >= self._settings.max_migrations_out:
            return MigrationOutcome(MigrationResult.REFUSED, "source_busy", epoch)
        if flight.replay is not None and not flight.replay.finished:
            return MigrationOutcome(MigrationResult.UNMOVABLE, "arriving", epoch)
        return None

    async def _migrate(self, plan: MigrationPlan, exchange: Exchange) -> MigrationOutcome:
        try:
            outcome = await self._session(plan, exchange)
        except Exception:
            log.exception("migrating %s failed", plan.request)
            outcome = MigrationOutcome(MigrationResult.FAILED, "internal", exchange.flight.leg.epoch)
        self._metrics.count(outcome)
        self._learn(plan.request, outcome)
        return outcome

    def _learn(self, request: RequestId, outcome: MigrationOutcome) -> None:
        if outcome.result is MigrationResult.MOVED:
            self.usual_s += GUESS_WEIGHT * (outcome.total_ms / 1000 - self.usual_s)
            return
        now_s = self._clock()
        self._stayed = {each: at_s for each, at_s in self._stayed.items() if now_s - at_s < STAYED_KEPT_S}
        self._stayed[request] = now_s

    async def _session(self, plan: MigrationPlan, exchange: Exchange) -> MigrationOutcome:
        flight = exchange.flight
        departure = Departure(
            plan=plan,
            source=InstanceId(self._settings.instance_id),
            leg=flight.leg,
            new_leg=flight.next_leg,
            http=flight.http,
            created=lambda: _shown_created(flight),
            tier=flight.tier,
            prefill=lambda: flight.prefill,
        )
        return await run_migration(
            departure,
            engine=self._engine,
            link=self._links.to(plan.destination.url),
            announce=_announcer(exchange),
            settings=self._settings.session(),
            clock=self._clock,
            pair=self._pairs.setdefault(plan.destination.instance, Pair()),
        )


def _shown_created(flight: Flight) -> int:
    """The `created` second of the answer. Fixed now if the client has been shown none: then both sides rewrite their own."""
    if flight.created is None:
        flight.created = int(datetime.now(UTC).timestamp())
    return flight.created


def _announcer(exchange: Exchange) -> Callable[[Announcement], Awaitable[None]]:
    async def announce(news: Announcement) -> None:
        match news:
            case Moving(epoch, instance, url):
                exchange.say(moving_event(epoch, instance, url))
            case Kept(epoch):
                exchange.say(kept_event(epoch))
            case Moved(epoch):
                exchange.hand_over(moved_event(epoch))
            case Lost(_, reason):
                exchange.hand_over(lost_event(reason))

    return announce
