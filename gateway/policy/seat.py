"""PURE. An instance as bindings find it: what is left of it, and the parts of its price (price.py) that no request changes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.policy.dispatch import Vacancy
from gateway.policy.load import standing
from gateway.policy.tier import Tiers
from gateway.policy.view import InstanceView, ViewState

CLOSED = -(2**62)
"""The room of an instance that takes nobody more."""


@dataclass(slots=True)
class Seat:
    """Never changed: a binding puts another one in its place.

    `room` is in tokens. `own_s` is a newcomer's step but for its own context, `others_s` what it adds by its number alone to the steps of
    those who are there, `stall_s` what each token of its prompt costs them.
    """

    view: InstanceView
    models: tuple[str, ...]
    is_measured: bool
    vacancy: Vacancy
    room: int
    claims: int
    requests: int
    running: int
    tokens: int
    weight: float
    own_s: float
    others_s: float
    per_token_s: float
    stall_s: float
    crowding: float
    """Room per running request, negative: what orders seats of one price."""

    def price_s(self, weight: float, tokens: int, steps: float) -> float:
        """What placement_cost_s says of a request of that weight and so many tokens, here."""
        return steps * (weight * self.own_s + self.others_s) + tokens * (steps * self.per_token_s * (weight + self.weight) + self.stall_s)

    def clearable_tokens(self, gaps_tokens: Sequence[float]) -> float:
        """What can be free here once its requests, taken to be equally long, have moved into those gaps of other instances."""
        each = self.tokens / max(1, self.running) + self.view.report.block_tokens
        return self.vacancy.free_tokens + min(self.tokens, sum(gap // each * each for gap in gaps_tokens if gap >= each))

    def taken(self, tokens: int, weight: float, growth_tokens: float, *, ahead: bool) -> "Seat":
        """With one more request. Nobody else is to come where one was bound `ahead` of room, nor beyond the engine's batch."""
        report = self.view.report
        vacancy = Vacancy(self.vacancy.free_tokens - -(-tokens // report.block_tokens) * report.block_tokens, self.vacancy.requests + 1)
        closed = ahead or self.claims + 1 >= report.max_batch
        room = CLOSED if closed else vacancy.room_tokens(report, growth_tokens)
        held = self.tokens + tokens
        return _seat(self.view, vacancy, room, self.claims + 1, self.requests + 1, self.running + 1, held, self.weight + weight)


def seat_of(view: InstanceView, tiers: Tiers, growth_tokens: float) -> Seat:
    """The instance as it is."""
    sums, vacancy = standing(view, tiers), Vacancy.of(view)
    room = vacancy.room_tokens(view.report, growth_tokens)
    return _seat(view, vacancy, room, view.claims, sums.requests, sums.running, sums.tokens, sums.weight)


def _seat(view: InstanceView, vacancy: Vacancy, room: int, claims: int, requests: int, running: int, tokens: int, weight: float) -> Seat:
    cost = view.report.cost
    return Seat(
        view,
        view.report.models,
        view.report.is_measured,
        vacancy,
        room,
        claims,
        requests,
        running,
        tokens,
        weight,
        own_s=cost.base_s + cost.per_token_s * tokens + cost.per_request_s * (requests + 1),
        others_s=cost.per_request_s * weight,
        per_token_s=cost.per_token_s,
        stall_s=weight / cost.prefill_tokens_per_s if cost.prefill_tokens_per_s else 0.0,
        crowding=-room / max(1, running),
    )


class SeatMemory:
    """Seats that need not be made again for each request, as long as an instance's report and claims are the same."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._growth_tokens = 0.0
        self._views: tuple[InstanceView, ...] = ()
        self._seats: list[Seat | None] = []

    def seats(self, views: tuple[InstanceView, ...], growth_tokens: float) -> list[Seat]:
        """Of those that are ready, in order; the list is the caller's."""
        if growth_tokens != self._growth_tokens:
            self._growth_tokens = growth_tokens
            self._seats = [seat and self._with_room(seat) for seat in self._seats]
        if len(views) == len(self._views):
            known = zip(views, self._views, self._seats, strict=True)
            self._seats = [seat if view is last else self._seat(view, seat) for view, last, seat in known]
        else:
            self._seats = [self._seat(view, None) for view in views]
        self._views = views
        return [seat for seat in self._seats if seat is not None]

    def _seat(self, view: InstanceView, known: Seat | None) -> Seat | None:
        if view.state is not ViewState.READY:
            return None
        if known is not None:
            last = known.view
            if last.report is view.report and last.claims == view.claims and last.claimed_tokens == view.claimed_tokens:
                return known
        return seat_of(view, self._tiers, self._growth_tokens)

    def _with_room(self, seat: Seat) -> Seat:
        room = seat.vacancy.room_tokens(seat.view.report, self._growth_tokens)
        return _seat(seat.view, seat.vacancy, room, seat.claims, seat.requests, seat.running, seat.tokens, seat.weight)
