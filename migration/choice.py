"""PURE. Which running request a source gives away, and to whom. Asked by a rebalancer, which knows sums; answered by the llumlet, which
knows its requests; so a decision costs the rebalancer nothing that grows with the number of requests.

The price of a place. Instance i holds L_i context tokens in n_i requests of total weight W_i; its step takes a + b L_i + c n_i.
A request r of weight w_r and context C_r that moves from i to d changes the weighted sum of all step times per token by

    gain = w_r (b (L_i - L_d - C_r) + c (n_i - n_d - 1) - theta) + (b C_r + c) (W_i - W_d - w_r)

its own steps' change (less theta, what a move must bring at least), and what its leaving and coming does to its neighbours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from migration.leg import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Standing:
    """One instance in sums. `requests` (and `tokens`, their context, and `weight`) count running, queued and incoming ones."""

    instance: InstanceId
    free_tokens: int
    head_tokens: int
    running: int
    requests: int
    tokens: int
    weight: float

    @property
    def freeness(self) -> float:
        """Free tokens per running request, once the head of the queue has what it needs."""
        return (self.free_tokens - self.head_tokens) / max(1, self.running)


@dataclass(frozen=True, slots=True)
class Movable:
    """A request that may go. Lower `rank` is more urgent; `remaining_tokens` is what it may still generate, at most, if that is known."""

    request: RequestId
    rank: int
    weight: float
    tokens: int
    remaining_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PriceRule:
    """b and c of the source's step time, theta, and the memory a destination keeps free for each of its requests after the move."""

    per_token_s: float
    per_request_s: float
    threshold_s: float
    keep_tokens: int


@dataclass(frozen=True, slots=True)
class Move:
    """This request, there; `gain_s` is the weighted step time it saves per token."""

    request: RequestId
    destination: InstanceId
    gain_s: float


def lasting(movable: Iterable[Movable], least_tokens: float) -> Sequence[Movable]:
    """Those that are not known to end within that many tokens."""
    return [each for each in movable if each.remaining_tokens is None or each.remaining_tokens > least_tokens]


def evacuee(movable: Iterable[Movable]) -> Movable | None:
    """The request that leaves first: the least urgent, then the shortest, then by id."""
    return min(movable, key=lambda each: (-each.rank, each.tokens, each.request), default=None)


def relief(movable: Iterable[Movable], source: Standing, destination: Standing) -> Movable | None:
    """The request whose leaving gives the source room most cheaply: the least urgent, then the shortest, then by id.

    None if there is none, if it does not fit, or if the move would leave the destination less free than the source was.
    """
    best = evacuee(movable)
    if best is None or best.tokens > destination.free_tokens - destination.head_tokens:
        return None
    after = (destination.free_tokens - destination.head_tokens - best.tokens) / (destination.running + 1)
    return best if after > source.freeness else None


def best_moves(movable: Iterable[Movable], source: Standing, destinations: Sequence[Standing], rule: PriceRule) -> Sequence[Move]:
    """For each destination the move that gains most there, if any gains at all; in the order of the destinations.

    For one tier and one destination the gain is linear in the context's length, so only its shortest request and its longest that fits
    can be the best.
    """
    by_weight: dict[float, list[Movable]] = {}
    for each in sorted(movable, key=attrgetter("tokens", "request")):
        by_weight.setdefault(each.weight, []).append(each)
    moves = []
    for destination in destinations:
        room = destination.free_tokens - rule.keep_tokens * (destination.running + 1)
        best: Move | None = None
        for requests in by_weight.values():
            pick = _extreme(requests, source, destination, room)
            if pick is not None:
                gain_s = gain(pick, source, destination, rule)
                if gain_s > 0 and (best is None or gain_s > best.gain_s):
                    best = Move(pick.request, destination.instance, gain_s)
        if best is not None:
            moves.append(best)
    return moves


def gain(each: Movable, source: Standing, destination: Standing, rule: PriceRule) -> float:
    """Weighted seconds of step time saved per token by that move (the formula above)."""
    b, c = rule.per_token_s, rule.per_request_s
    own = b * (source.tokens - destination.tokens - each.tokens) + c * (source.requests - destination.requests - 1) - rule.threshold_s
    return each.weight * own + (b * each.tokens + c) * (source.weight - destination.weight - each.weight)


def _extreme(requests: Sequence[Movable], source: Standing, destination: Standing, room: int) -> Movable | None:
    """Of one tier's requests, shortest first: the longest that fits if length adds to the gain, else the shortest."""
    if requests[0].tokens > room:
        return None
    if source.weight - destination.weight <= 2 * requests[0].weight:
        return requests[0]
    for each in reversed(requests):
        if each.tokens <= room:
            return each
    return None
