"""Which of the requests here would leave, as a rebalancer asks: chosen by what their flights tell, and the engine is asked about the
chosen alone."""

import json
from collections.abc import Callable, Sequence

from backend.engine.base import Engine
from backend.engine.flight import Flight
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import Flights
from backend.llumlet.migrations import Migrations
from migration.choice import Movable
from migration.errors import MigrationError
from migration.leg import Leg, RequestId
from migration.ports import Phase
from migration.question import Answer, Question, Wanted, choose

REST_S = 2.0
"""A request whose move came to nothing is not offered again for so long."""
MAX_LOOKS = 8
"""Requests whose phase the engine is asked for, at most, to answer one question."""
QUIET_STEPS = 2.0
"""A request that has had no token for so many steps may have been preempted."""


class Choices:
    """One instance's. `clock` is the migrations' and the arrivals': monotonic, in seconds."""

    def __init__(self, engine: Engine, flights: Flights, migrations: Migrations, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._flights = flights
        self._migrations = migrations
        self._clock = clock
        self._asked: dict[Leg, int | None] = {}
        """The longest output each request asked for."""
        self._heard: dict[Leg, tuple[int, float]] = {}
        """How many tokens each request had when a release was wanted, and since when."""

    async def answer(self, question: Question) -> Answer:
        """The moves this instance offers. Each request of them was in the phase that the question is about a moment ago."""
        phase = Phase.WAITING if question.wanted in (Wanted.REQUEUE, Wanted.RELEASE) else Phase.DECODE
        candidates = self._candidates(question)
        least_tokens = self._tokens_of_a_move() if phase is Phase.DECODE else 0.0
        looked: dict[RequestId, bool] = {}
        while True:
            moves = choose(question, candidates, least_remaining_tokens=least_tokens)
            doubtful = [move.request for move in moves if move.request not in looked]
            if not doubtful or len(looked) >= MAX_LOOKS:
                return Answer(tuple(move for move in moves if looked.get(move.request)))
            for request in tuple(dict.fromkeys(doubtful))[: MAX_LOOKS - len(looked)]:
                looked[request] = await self._is_in(phase, request)
            candidates = [each for each in candidates if looked.get(each.request, True)]

    def _candidates(self, question: Question) -> Sequence[Movable]:
        """In the order they came. For a requeue those that have computed nothing here come first, then those that may have been preempted,
        the latest first: an engine takes memory from the latest."""
        settled_s = self._clock() - question.cool_down_s
        exchanges = [exchange for exchange in self._flights if self._may_leave(exchange.flight, settled_s)]
        self._asked = {leg: tokens for leg, tokens in self._asked.items() if any(one.flight.leg == leg for one in exchanges)}
        started = [one for one in exchanges if one.flight.history]
        if question.wanted is Wanted.RELEASE:
            return [self._movable(one, question) for one in self._quiet(started) if _ran_here(one.flight)]
        if question.wanted is not Wanted.REQUEUE:
            return [self._movable(one, question) for one in started]
        fresh = [one for one in exchanges if not one.flight.history]
        return [self._movable(one, question) for one in (*fresh, *reversed(started))]

    def _quiet(self, started: Sequence[Exchange]) -> Sequence[Exchange]:
        """Those that have had no token for a while, as far as it is known from one question to the next, the latest first. The engine
        need not be asked about the others."""
        now_s, before = self._clock(), self._heard
        self._heard = {}
        for flight in (one.flight for one in started):
            tokens, since_s = before.get(flight.leg, (-1, now_s))
            self._heard[flight.leg] = (len(flight.history), since_s if tokens == len(flight.history) else now_s)
        least_s = QUIET_STEPS * self._engine.load().cost.last_step_s
        return [one for one in reversed(started) if 0 < now_s - self._heard[one.flight.leg][1] >= least_s]

    def _may_leave(self, flight: Flight, settled_s: float) -> bool:
        request = flight.leg.request
        return not (
            flight.ended.is_set()
            or flight.unmovable is not None
            or len(flight.engine_requests) != 1
            or (flight.replay is not None and not flight.replay.finished)
            or flight.owned_since_s > settled_s
            or self._migrations.is_moving(request)
            or self._migrations.stayed_since_s(request) > self._clock() - REST_S
        )

    def _movable(self, exchange: Exchange, question: Question) -> Movable:
        flight = exchange.flight
        tier = question.tier(flight.tier)
        longest = self._longest_output(flight)
        remaining = None if longest is None else max(0, longest - len(flight.history))
        return Movable(flight.leg.request, tier.rank, tier.weight, flight.prompt_tokens + len(flight.history), remaining)

    def _longest_output(self, flight: Flight) -> int | None:
        if flight.leg not in self._asked:
            self._asked[flight.leg] = longest_output(flight.http.body)
        return self._asked[flight.leg]

    def _tokens_of_a_move(self) -> float:
        """What a request generates here while it moves: it must have more to come than that, or it would end first."""
        step_s = self._engine.load().cost.last_step_s
        return self._migrations.usual_s / step_s if step_s > 0 else 0.0

    async def _is_in(self, phase: Phase, request: RequestId) -> bool:
        exchange = self._flights.latest(request)
        if exchange is None:
            return False
        try:
            return (await self._engine.look(exchange.flight.leg)).phase is phase
        except MigrationError:
            return False


def _ran_here(flight: Flight) -> bool:
    """It has had tokens that it did not bring."""
    return len(flight.history) > (len(flight.replay.steps) if flight.replay is not None else 0)


def longest_output(body: bytes) -> int | None:
    """The bound on its output that a request's body names, in tokens."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    named = [fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    return next((value for value in named if isinstance(value, int) and not isinstance(value, bool)), None)
