from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migration.choice import Movable, PriceRule, Standing, best_moves, gain, relief
from migration.leg import InstanceId, RequestId

RULE = PriceRule(3.5e-6, 0.15e-3, 0.005, 160)


def standing(name: str, tokens: int, requests: int, *, capacity: int = 13616, head: int = 0, weight: float | None = None) -> Standing:
    total = float(requests) if weight is None else weight
    return Standing(InstanceId(name), capacity - tokens, head, requests, requests, tokens, total)


def movable(name: str, tokens: int, rank: int = 1, weight: float = 1.0) -> Movable:
    return Movable(RequestId(name), rank, weight, tokens)


def test_the_least_urgent_then_the_shortest_gives_way() -> None:
    requests = [movable("a", 300), movable("b", 200), movable("c", 900, rank=2), movable("d", 10, rank=0)]
    chosen = relief(requests, standing("s", 13000, 20), standing("d", 2000, 3))
    assert chosen is not None
    assert chosen.request == "c"
    chosen = relief(requests[:2], standing("s", 13000, 20), standing("d", 2000, 3))
    assert chosen is not None
    assert chosen.request == "b"


def test_nothing_moves_where_it_does_not_fit_or_only_swaps_the_trouble() -> None:
    source = standing("s", 13000, 20)
    assert relief([movable("a", 5000)], source, standing("d", 9000, 3)) is None
    assert relief([movable("a", 1000)], source, standing("d", 12600, 30)) is None
    assert relief([], source, standing("d", 0, 0)) is None
    assert relief([movable("a", 1000)], source, standing("d", 3000, 3, head=10_000)) is None


def test_price_moves_the_long_one_away_from_many_short_ones() -> None:
    source, destination = standing("s", 6000, 20), standing("d", 4500, 2)
    requests = [movable("long", 3000), *(movable(f"short{n}", 150) for n in range(19))]
    (move,) = best_moves(requests, source, [destination], RULE)
    assert move.request == "long"
    assert move.gain_s == pytest.approx(gain(requests[0], source, destination, RULE))


def test_an_urgent_one_flees_a_loaded_instance() -> None:
    source, destination = standing("s", 9000, 12, weight=21.0), standing("d", 2000, 12)
    requests = [movable("urgent", 200, 0, 10.0), *(movable(f"n{n}", 800) for n in range(11))]
    (move,) = best_moves(requests, source, [destination], RULE)
    assert move.request == "urgent"


def test_equal_instances_keep_what_they_have() -> None:
    assert not best_moves([movable("a", 500)], standing("s", 5000, 10), [standing("d", 5000, 10)], RULE)


def test_a_destination_keeps_room_for_each_of_its_requests() -> None:
    source = standing("s", 13000, 20)
    tight = standing("d", 13616 - 11 * 160 - 499, 10)
    assert not best_moves([movable("a", 500)], source, [tight], replace(RULE, threshold_s=-1.0))
    assert best_moves([movable("a", 499)], source, [tight], replace(RULE, threshold_s=-1.0))


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([0.2, 1.0, 10.0])), min_size=1, max_size=12),
    st.integers(0, 13000),
    st.integers(0, 40),
    st.integers(0, 13000),
    st.integers(0, 40),
)
def test_the_answer_is_the_best_of_all(requests: list[tuple[int, float]], tokens: int, n: int, there: int, others: int) -> None:
    """Looking at the shortest and the longest that fits is as good as looking at every request."""
    here = [movable(f"r{i}", length, 1, weight) for i, (length, weight) in enumerate(requests)]
    source, destination = standing("s", tokens, n), standing("d", there, others)
    room = destination.free_tokens - RULE.keep_tokens * (others + 1)
    gains = [gain(each, source, destination, RULE) for each in here if each.tokens <= room]
    moves = best_moves(here, source, [destination], RULE)
    best = max(gains, default=0.0)
    assert [move.gain_s for move in moves] == ([pytest.approx(best)] if best > 0 else [])
