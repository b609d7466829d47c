"""POST /midstream/release: requests that were preempted here, and wait for memory, are offered to their gateways.

The gateway knows whether it can go on with the request from what its client has seen. If so it closes the stream, and the request waits
in line; if not the request keeps its place in the engine's queue. So nothing is given up here.
"""

from backend.llumlet.choices import Choices
from backend.llumlet.flights import Flights
from backend.llumlet.wire import preempted_event
from migration.leg import Leg, RequestId
from migration.question import Answer, Question


class Releases:
    """One instance's."""

    def __init__(self, choices: Choices, flights: Flights) -> None:
        self._choices = choices
        self._flights = flights
        self._offered: dict[Leg, int] = {}
        """How many tokens each request had when it was offered: once for each time that it is preempted."""

    async def answer(self, question: Question) -> Answer:
        """Offer whom the question wants, and tell who that is."""
        moves = (await self._choices.answer(question)).moves
        self._offered = {exchange.flight.leg: self._offered.get(exchange.flight.leg, -1) for exchange in self._flights}
        return Answer(tuple(move for move in moves if self._offer(move.request)))

    def _offer(self, request: RequestId) -> bool:
        exchange = self._flights.latest(request)
        if exchange is None or exchange.handed_over:
            return False
        leg, tokens = exchange.flight.leg, len(exchange.flight.history)
        if self._offered.get(leg) == tokens:
            return False
        self._offered[leg] = tokens
        exchange.say(preempted_event())
        return True
