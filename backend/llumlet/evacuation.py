"""Moves every request of a draining instance away, several at a time, until none is left that can go.

The instance does it itself, whoever told it to drain: it alone knows its requests, and on SIGTERM no gateway may be there to ask. It
reads the other instances' reports in the shared store. A request that could not go is tried again, later each time, elsewhere if it
can be; what can never move stays, and ends here.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from backend.engine.flight import Flight
from backend.llumlet.drain import Drain
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import Flights
from backend.llumlet.migrations import Migrations, UnknownRequest
from backend.llumlet.refuge import Coming, Refuge, choose_refuge, refuges
from backend.llumlet.settings import LlumletSettings
from backend.registry.store import InstanceStore, Sighting, StoreError
from migration.leg import InstanceId, RequestId
from migration.plan import MigrationMode, MigrationPlan, MigrationResult

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""What has become movable, and who has room, is looked at so often."""
GROWTH, MAX_GROWTHS = 2.0, 4
"""Of the pause after each failed attempt."""
MAX_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Departed:
    """What became of the attempts to move one request away: the last of them."""

    request: RequestId
    destination: InstanceId
    result: str
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A move under way."""

    destination: InstanceId
    tokens: int


class Evacuation:
    """Acts while `drain` says so. `models` tells what is served here; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        drain: Drain,
        flights: Flights,
        migrations: Migrations,
        store: InstanceStore,
        settings: LlumletSettings,
        *,
        models: Callable[[], Sequence[str]],
        clock: Callable[[], float],
    ) -> None:
        self._drain = drain
        self._flights = flights
        self._migrations = migrations
        self._store = store
        self._settings = settings
        self._models = models
        self._clock = clock
        self._under_way: dict[RequestId, _Leaving] = {}
        self._not_before_s: dict[RequestId, float] = {}
        self._departed: dict[RequestId, Departed] = {}
        self._sightings: Sequence[Sighting] = ()
        self._look_now = asyncio.Event()

    @property
    def departed(self) -> Sequence[Departed]:
        """What became of the requests of this drain, of the last thousand at most."""
        return tuple(self._departed.values())

    async def run(self) -> None:
        """Move requests away whenever it drains, until cancelled."""
        async with asyncio.TaskGroup() as moves:
            while True:
                if not self._drain.draining:
                    await self._drain.wait_draining()
                    self._departed.clear()
                    self._not_before_s.clear()
                if waiting := self._ready_to_go():
                    await self._look()
                    self._send_off(waiting, moves)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._look_now.wait()
                self._look_now.clear()

    def _ready_to_go(self) -> list[Flight]:
        """The requests to move now, those first that have been tried least."""
        now_s = self._clock()
        going = [exchange.flight for exchange in self._flights if self._may_go(exchange, now_s)]
        return sorted(going, key=lambda flight: self._attempts(flight.leg.request))

    def _may_go(self, exchange: Exchange, now_s: float) -> bool:
        flight = exchange.flight
        request = flight.leg.request
        is_arriving = flight.replay is not None and not flight.replay.finished
        return not (
            is_arriving
            or exchange.handed_over
            or flight.ended.is_set()
            or flight.unmovable is not None
            or request in self._under_way
            or self._migrations.is_moving(request)
            or self._not_before_s.get(request, now_s) > now_s
        )

    async def _look(self) -> None:
        """At the other instances; if the store does not answer, the last look has to do."""
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                self._sightings = await self._store.sightings()
        except (StoreError, TimeoutError) as error:
            log.warning("draining, and the shared store does not tell where to (%r)", error)

    def _send_off(self, waiting: Sequence[Flight], moves: asyncio.TaskGroup) -> None:
        here = InstanceId(self._settings.instance_id)
        among = refuges(self._sightings, here, self._models(), self._settings.report_ttl_s / 2)
        for flight in waiting:
            if len(self._migrations) + self._unstarted() >= self._settings.max_migrations_out:
                return
            tokens = flight.prompt_tokens + len(flight.history)
            refuge = choose_refuge(tokens, among, self._coming(), self._settings.max_migrations_in, self._failed_at(flight.leg.request))
            if refuge is not None:
                self._under_way[flight.leg.request] = _Leaving(refuge.destination.instance, tokens)
                moves.create_task(self._move(flight, refuge))

    def _unstarted(self) -> int:
        """Moves that were sent off and that `migrations` does not count yet."""
        return sum(not self._migrations.is_moving(request) for request in self._under_way)

    def _coming(self) -> Mapping[InstanceId, Coming]:
        requests: Counter[InstanceId] = Counter()
        tokens: Counter[InstanceId] = Counter()
        for leaving in self._under_way.values():
            requests[leaving.destination] += 1
            tokens[leaving.destination] += leaving.tokens
        return {instance: Coming(requests[instance], tokens[instance]) for instance in requests}

    async def _move(self, flight: Flight, refuge: Refuge) -> None:
        request = flight.leg.request
        attempts = self._attempts(request) + 1
        try:
            outcome = await self._migrations.run(MigrationPlan(request, refuge.destination, MigrationMode.LIVE))
            result, reason = outcome.result, outcome.reason
        except UnknownRequest:
            result, reason = MigrationResult.ENDED, "request_ended"
        finally:
            del self._under_way[request]
        self._remember(Departed(request, refuge.destination.instance, result.value, reason, attempts))
        if result is not MigrationResult.MOVED:
            pause_s = self._settings.drain_retry_s * GROWTH ** min(attempts - 1, MAX_GROWTHS)
            self._not_before_s[request] = self._clock() + pause_s
        self._look_now.set()

    def _remember(self, departed: Departed) -> None:
        self._departed.pop(departed.request, None)
        self._departed[departed.request] = departed
        if len(self._departed) > MAX_REMEMBERED:
            oldest = next(iter(self._departed))
            del self._departed[oldest]
            self._not_before_s.pop(oldest, None)

    def _attempts(self, request: RequestId) -> int:
        known = self._departed.get(request)
        return known.attempts if known is not None else 0

    def _failed_at(self, request: RequestId) -> InstanceId | None:
        known = self._departed.get(request)
        return known.destination if known is not None else None
