"""PURE. What a rebalancer asks a source's llumlet, and how the llumlet chooses its answer: sums go there, at most one move for each
destination comes back. Both sides, and the simulator, use these types and this choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from migration.choice import Movable, Move, PriceRule, Standing, best_moves, evacuee, lasting, relief
from migration.typed_json import decode, encode


class Wanted(StrEnum):
    """Why a request is to leave."""

    RELIEF = "relief"
    """The source is short of memory: its cheapest request to move, if that leaves the destination freer than the source was."""
    LEAVE = "leave"
    """The source must get empty: the same, wherever that leaves the destination."""
    TRADE = "trade"
    """To each destination, the request that gains most there."""
    REQUEUE = "requeue"
    """A request that waits for memory, and would start there at once."""
    RELEASE = "release"
    """All requests that have lost their memory and wait for it again: they go back to the line."""


@dataclass(frozen=True, slots=True)
class TierValue:
    """A tier as moves see it. Lower `rank` is more urgent."""

    name: str
    rank: int
    weight: float


NO_PRICE = PriceRule(0.0, 0.0, 0.0, 0)
"""Where nothing is traded."""


@dataclass(frozen=True, slots=True)
class Question:
    """Whom would you give away? `token` is the asker's fencing token; `tiers` begins with the one that unknown names belong to.

    A request that came less than `cool_down_s` ago stays. `rule` matters to a trade only, `least_tokens` to a release: the shortest request
    that goes.
    """

    token: int
    wanted: Wanted
    source: Standing
    destinations: tuple[Standing, ...]
    tiers: tuple[TierValue, ...]
    rule: PriceRule = NO_PRICE
    cool_down_s: float = 0.0
    least_tokens: int = 0

    def tier(self, name: str) -> TierValue:
        """That tier, or the first."""
        return next((tier for tier in self.tiers if tier.name == name), self.tiers[0])

    def to_json(self) -> object:
        """JSON-able."""
        return encode(self)

    @staticmethod
    def from_json(value: object) -> "Question":
        """Raises ValueError: malformed, or without a tier, a destination or a token."""
        question = decode(Question, value)
        if not question.tiers or not question.destinations or question.token < 0:
            raise ValueError("a question needs a token, tiers and destinations")
        return question


@dataclass(frozen=True, slots=True)
class Answer:
    """The moves that the source offers; empty if it has none."""

    moves: tuple[Move, ...]

    def to_json(self) -> object:
        """JSON-able."""
        return encode(self)

    @staticmethod
    def from_json(value: object) -> "Answer":
        """Raises ValueError."""
        return decode(Answer, value)


def choose(question: Question, movable: Iterable[Movable], *, least_remaining_tokens: float = 0.0) -> Sequence[Move]:
    """The moves to offer. `movable` are running requests; if a requeue is wanted waiting ones, if a release is wanted those of them that
    ran here before, in their order. Whoever will end within `least_remaining_tokens` more tokens stays: it would be over before it has
    moved."""
    source, first = question.source, question.destinations[0]
    candidates = lasting(movable, least_remaining_tokens)
    match question.wanted:
        case Wanted.TRADE:
            return best_moves(candidates, source, question.destinations, question.rule)
        case Wanted.RELIEF:
            chosen = relief(candidates, source, first)
        case Wanted.LEAVE:
            chosen = evacuee(candidates)
        case Wanted.REQUEUE:
            room = first.free_tokens - first.head_tokens
            chosen = next((each for each in sorted(candidates, key=lambda each: each.rank) if each.tokens <= room), None)
        case Wanted.RELEASE:
            return [Move(each.request, first.instance, 0.0) for each in candidates if each.tokens >= question.least_tokens]
    return [Move(chosen.request, first.instance, 0.0)] if chosen is not None else []
