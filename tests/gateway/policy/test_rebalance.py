from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import InstanceKind, TierLoad
from gateway.policy.rebalance import FreenessPairing, Grant, Pair, PriceStep, QueueStep, Reason, ReleaseStep, pools
from gateway.policy.view import ViewState
from migration.choice import Move
from migration.leg import InstanceId, RequestId
from tests.gateway.policy.views import COST, cluster, instance


def pairs(*views: object, **targets: int) -> list[tuple[str, str]]:
    found = FreenessPairing(targets=targets).pairs(cluster(*views))  # type: ignore[arg-type]
    return [(pair.source, pair.destination) for pair in found]


def test_the_lowest_is_paired_with_the_highest() -> None:
    views = [
        instance("a", held=1590, running=4),
        instance("b", held=1500, running=4),
        instance("c", held=1000, running=4),
        instance("d", held=200, running=4),
    ]
    assert pairs(*views) == [("a", "d"), ("b", "c")]


def test_a_blocked_head_makes_a_source() -> None:
    assert pairs(instance("a", held=1000, running=2, waiting=(700,)), instance("b", held=200, running=2)) == [("a", "b")]
    assert pairs(instance("a", held=1000, running=2, waiting=(100, 900)), instance("b", held=200, running=2)) == []


def test_a_blocked_head_makes_room_where_newcomers_would_not_be_let_in() -> None:
    blocked, tight = instance("a", held=1400, running=4, waiting=(700,)), instance("b", held=1550, running=4)
    assert pairs(blocked, tight) == []
    found = FreenessPairing(unblock_tokens=8).pairs(cluster(blocked, tight))
    assert [(pair.source, pair.destination) for pair in found] == [("a", "b")]
    assert not FreenessPairing(unblock_tokens=8).pairs(cluster(blocked, instance("b", held=1580, running=4)))
    short_of_memory = instance("a", held=1580, running=4)
    assert not FreenessPairing(unblock_tokens=8).pairs(cluster(short_of_memory, tight))


def test_nobody_gives_to_itself_or_to_who_has_less() -> None:
    views = [instance(name, held=held, running=10) for name, held in (("a", 1300), ("b", 1250), ("c", 1200))]
    found = FreenessPairing(in_tokens=24).pairs(cluster(*views))
    assert [(pair.source, pair.destination) for pair in found] == [("a", "c")]


def test_between_the_thresholds_nothing_happens() -> None:
    assert pairs(instance("a", held=1300, running=4), instance("b")) == []


def test_draining_gives_and_never_takes() -> None:
    draining = instance("a", held=100, running=1, state=ViewState.DRAINING)
    assert FreenessPairing().pairs(cluster(draining, instance("b"))) == [Pair(InstanceId("a"), InstanceId("b"), Reason.DRAINING)]
    assert pairs(instance("a", held=1600, running=4), instance("b", state=ViewState.DRAINING)) == []
    assert pairs(instance("a", state=ViewState.DRAINING), instance("b")) == []


def test_stale_and_starting_are_left_alone() -> None:
    full = instance("a", held=1600, running=4)
    assert pairs(full, instance("b", state=ViewState.STALE), instance("c", state=ViewState.STARTING)) == []
    assert pairs(instance("a", held=1600, running=4, state=ViewState.STALE), instance("b")) == []


def test_head_room_makes_a_source_of_a_busy_place() -> None:
    tiers = (("high", TierLoad(1, 600)),)
    views = [instance("a", held=600, running=1, tiers=tiers), instance("b")]
    assert pairs(*views, high=400) == [("a", "b")]
    assert pairs(*views) == []


def test_offers_go_to_whoever_might_gain() -> None:
    loaded, idle = instance("a", held=1400, running=30, cost=COST), instance("b", cost=COST)
    (offer,) = PriceStep().offers(cluster(loaded, idle), frozenset(), frozenset())
    assert offer.source.instance == "a"
    assert [each.instance for each in offer.destinations] == ["b"]
    assert offer.rule.keep_tokens == 160
    assert offer.rule.per_token_s == COST.per_token_s


def test_busy_ones_and_queues_are_not_offered() -> None:
    a, b = InstanceId("a"), InstanceId("b")
    loaded, idle = instance("a", held=1400, running=30, cost=COST), instance("b", cost=COST)
    where = cluster(loaded, idle)
    assert not PriceStep().offers(where, frozenset({a}), frozenset())
    assert not PriceStep().offers(where, frozenset(), frozenset({b}))
    assert not PriceStep().offers(where, frozenset({b}), frozenset())
    assert not PriceStep().offers(cluster(loaded, instance("b", waiting=(10,), cost=COST)), frozenset(), frozenset())


def move(destination: str, gain_s: float) -> Move:
    return Move(RequestId(f"r-{destination}-{gain_s}"), InstanceId(destination), gain_s)


def test_the_largest_gain_is_granted_first() -> None:
    a, b, c = (InstanceId(name) for name in "abc")
    best, second, third = move("d", 3.0), move("d", 2.0), move("e", 1.0)
    granted = PriceStep().grants({a: [second, third], b: [best], c: [move("e", 0.5)]})
    assert granted == [Grant(b, best), Grant(a, third)]


@given(
    st.dictionaries(
        st.sampled_from([InstanceId(name) for name in "abcdef"]),
        st.lists(st.builds(move, st.sampled_from("abcdef"), st.floats(0.001, 10)), max_size=6),
    )
)
def test_nobody_takes_part_in_two_moves(answers: dict[InstanceId, list[Move]]) -> None:
    granted = PriceStep().grants(answers)
    involved = [each.source for each in granted] + [each.move.destination for each in granted if each.move.destination != each.source]
    assert len(set(involved)) == len(involved)


@given(st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 9), st.booleans()), max_size=8))
def test_a_pair_goes_from_below_to_above(loads: list[tuple[int, int, bool]]) -> None:
    views = [
        instance(f"i{n}", held=held, running=running, state=ViewState.DRAINING if leaving else ViewState.READY)
        for n, (held, running, leaving) in enumerate(loads)
    ]
    freeness = {
        view.id: -inf if view.state is ViewState.DRAINING else view.report.free_tokens / max(1, view.report.running) for view in views
    }
    found = FreenessPairing().pairs(cluster(*views))
    assert all(freeness[pair.source] < 48 < freeness[pair.destination] for pair in found)
    assert len({pair.source for pair in found} | {pair.destination for pair in found}) == 2 * len(found)


def queue_pairs(*views: object) -> list[tuple[str, str]]:
    found = QueueStep().pairs(cluster(*views))  # type: ignore[arg-type]
    assert all(pair.reason is Reason.QUEUE for pair in found)
    return [(pair.source, pair.destination) for pair in found]


def test_a_blocked_head_goes_where_most_room_is() -> None:
    blocked = instance("a", held=1500, running=2, waiting=(400,))
    assert queue_pairs(blocked, instance("b", held=900, running=2), instance("c", held=300, running=2)) == [("a", "c")]
    assert queue_pairs(blocked, instance("b", held=1216, running=2)) == []  # 384 free
    assert queue_pairs(blocked, instance("b", waiting=(10,))) == []
    assert queue_pairs(blocked, instance("b", moves_in=1)) == []
    assert queue_pairs(blocked, instance("b", state=ViewState.DRAINING)) == []


def test_a_head_that_has_room_or_a_full_batch() -> None:
    assert queue_pairs(instance("a", held=100, running=1, waiting=(400,)), instance("b")) == []
    assert queue_pairs(instance("a", held=100, running=4, waiting=(400,), max_batch=4), instance("b")) == [("a", "b")]


def test_who_has_a_blocked_head_is_asked_whom_it_lets_go() -> None:
    blocked, room = instance("a", held=1500, running=2, waiting=(400,)), instance("b", held=1000, running=2, waiting=(400,))
    full = instance("c", held=100, running=4, waiting=(400,), max_batch=4)
    assert ReleaseStep().sources(cluster(blocked, room, full, instance("d"))) == ["a", "c"]
    close = instance("e", held=1195, running=2, waiting=(400,))  # a hundredth of 1,600 stays free
    assert ReleaseStep().sources(cluster(close)) == ["e"]
    assert ReleaseStep().sources(cluster(instance("f", held=1180, running=2, waiting=(400,)))) == []
    plain = replace(blocked, report=replace(blocked.report, kind=InstanceKind.PASSIVE))
    assert ReleaseStep().sources(cluster(plain)) == []


@given(st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 9), st.integers(0, 900)), max_size=8))
def test_a_requeued_head_fits_and_nobody_is_in_two_pairs(loads: list[tuple[int, int, int]]) -> None:
    views = {
        f"i{n}": instance(f"i{n}", held=held, running=running, waiting=(waiting,) if waiting else ())
        for n, (held, running, waiting) in enumerate(loads)
    }
    found = queue_pairs(*views.values())
    for source, destination in found:
        assert views[source].report.head_tokens <= views[destination].report.free_tokens
    assert len({each for pair in found for each in pair}) == 2 * len(found)


def test_only_those_with_the_same_models_are_a_pool() -> None:
    other = instance("c")
    other = replace(other, report=replace(other.report, models=("n",)))
    found = pools(cluster(instance("a"), instance("b"), other))
    assert [[view.id for view in pool.instances] for pool in found] == [["a", "b"], ["c"]]
