from collections import Counter
from dataclasses import replace
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import StepCost
from gateway.policy.dispatch import LeastMemory, Vacancy
from gateway.policy.line import Binding, Immediate, LateBinding, LineView, Waiting
from gateway.policy.view import ClusterView, InstanceView, ViewState
from migration.leg import InstanceId
from tests.gateway.policy.views import COST, cluster, instance, request


def line(*tokens: int, waited_s: float = 0.0, ahead: int = 0) -> LineView:
    waiting = tuple(Waiting(request(f"r{n}", each), each, 100.0 - waited_s) for n, each in enumerate(tokens))
    return LineView(waiting, 100.0, ahead)


PLAIN = LateBinding(placement="freeness", growth=0.0, ahead=2, age_step_s=10.0)
"""Two heads ahead, and nothing kept for growth."""


def bind(view: LineView, where: ClusterView, policy: LateBinding = PLAIN, seed: int = 1) -> dict[str, Binding]:
    bindings = policy.bind(view, where, Random(seed))
    assert len({binding.request for binding in bindings}) == len(bindings)
    return {binding.request: binding for binding in bindings}


def full(name: str) -> InstanceView:
    return instance(name, held=1500, running=5)


def test_it_goes_where_it_fits_and_claims_what_it_saw() -> None:
    found = bind(line(400), cluster(instance("a", held=1200, running=5), instance("b", held=800, running=4)))
    assert found["r0"] == Binding(request("r0").request, InstanceId("b"), 4)


def test_it_fits_to_the_last_block() -> None:
    fits = instance("a", held=1600 - 400, running=4)
    assert not bind(line(400), cluster(fits))["r0"].ahead
    misses = instance("a", held=1600 - 400 + 16, running=4)
    assert bind(line(400), cluster(misses))["r0"].ahead


def test_what_is_bound_counts_for_the_next() -> None:
    found = bind(line(1000, 1000, 1000, 100), cluster(instance("a"), instance("b")), replace(PLAIN, ahead=0))
    assert {found["r0"].instance, found["r1"].instance} == {"a", "b"}
    assert "r2" not in found
    assert "r3" in found
    assert found["r3"].claims_seen == 1


def test_no_more_than_two_heads_are_bound_ahead_and_others_pass_them() -> None:
    where = cluster(*(full(name) for name in "abc"), instance("d", held=1200, running=1))
    found = bind(line(900, 900, 900, 100), where)
    assert [found[name].ahead for name in ("r0", "r1")] == [True, True]
    assert "r2" not in found
    assert "r3" not in found  # the roomiest instance, "d", is now the first head's
    found = bind(line(900, 900, 900, 100, ahead=2), where)
    assert list(found.values()) == [Binding(request("r3").request, InstanceId("d"), 1)]


def test_heads_bound_before_count() -> None:
    where = cluster(full("a"), full("b"))
    assert not bind(line(1000, ahead=2), where)
    assert len(bind(line(1000, 1000, ahead=1), where)) == 1


def test_an_instance_with_a_head_bound_ahead_is_closed() -> None:
    where = cluster(instance("a", held=1000, running=2))
    found = bind(line(1200, 100), where)
    assert list(found) == ["r0"]
    assert found["r0"].ahead


@pytest.mark.parametrize(("waited_s", "more"), [(0.0, 0), (9.9, 0), (10.0, 1), (25.0, 2), (35.0, 3), (90.0, 4)])
def test_the_longer_heads_wait_the_more_instances_are_theirs_but_only_a_share(waited_s: float, more: int) -> None:
    where = cluster(*(full(f"i{n:02}") for n in range(12)))
    assert len(bind(line(*[1000] * 9, ahead=2, waited_s=waited_s), where, replace(PLAIN, aged_share=0.5))) == more
    assert len(bind(line(*[1000] * 9, ahead=2, waited_s=waited_s), where)) == min(1, more)
    assert len(bind(line(*[1000] * 9, ahead=2, waited_s=waited_s), where, replace(PLAIN, age_step_s=0.0))) == 0


def test_more_stays_free_where_answers_are_long() -> None:
    """For three requests and the newcomer: growth * E * sqrt(4) tokens, at most 6 % of the memory."""
    policy = replace(PLAIN, growth=0.5)
    where = cluster(instance("a", held=1000, running=3))
    for answer, room in ((60.0, 600 - 60), (80.0, 600 - 80), (1000.0, 600 - 96)):
        for tokens, ahead in ((room // 16 * 16, False), (room // 16 * 16 + 1, True)):
            view = replace(line(tokens), expected_output_tokens=answer)
            assert bind(view, where, policy)["r0"].ahead is ahead, (answer, tokens)


@given(st.integers(0, 1600), st.integers(1, 40), st.floats(0, 1e4), st.floats(0, 2))
def test_growth_never_gives_room_nor_takes_more_than_its_share(held: int, running: int, answer: float, growth: float) -> None:
    view = instance("a", held=held, running=running)
    plain = Vacancy.of(view).room_tokens(view.report)
    room = Vacancy.of(view).room_tokens(view.report, growth * answer)
    assert plain - 96 - 16 <= room <= plain


def test_an_empty_instance_takes_whatever_fits() -> None:
    assert not bind(replace(line(1600), expected_output_tokens=1e6), cluster(instance("a")), replace(PLAIN, growth=1.0))["r0"].ahead


def test_a_head_goes_where_most_room_can_be_made() -> None:
    """Where many short requests run they fit into the gaps elsewhere; where a few long ones run they fit nowhere."""
    short, long, gaps = instance("a", held=1200, running=12), instance("b", held=1100, running=2), instance("c", held=1000, running=4)
    policy = replace(PLAIN, ahead=1, gap_keep_tokens=8.0)
    assert bind(line(1300), cluster(short, long, gaps), policy)["r0"] == Binding(request("r0").request, InstanceId("a"), 12, ahead=True)
    assert bind(line(1300), cluster(short, long), replace(policy, gap_keep_tokens=None))["r0"].instance == "b"


@given(st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 9)), min_size=1, max_size=24), st.integers(1, 1600))
def test_a_head_is_bound_ahead_to_one_that_can_hold_it(loads: list[tuple[int, int]], tokens: int) -> None:
    where = cluster(*(instance(f"i{n:02}", held=held if running else 0, running=running) for n, (held, running) in enumerate(loads)))
    found = bind(line(tokens, tokens, tokens), where, replace(PLAIN, ahead=3, aged_share=1.0, gap_keep_tokens=8.0))
    assert found["r0"].instance in {view.id for view in where.instances}
    ahead = [binding.instance for binding in found.values() if binding.ahead]
    assert len(set(ahead)) == len(ahead)


def preempted(tokens: int, *others: int, waited_s: float = 0.0, later_s: float = 0.0) -> LineView:
    """The first one ran before. The others came `later_s` after it."""
    first, *rest = line(tokens, *others, waited_s=waited_s).waiting
    return LineView((replace(first, again=True), *(replace(each, arrived_s=each.arrived_s + later_s) for each in rest)), 100.0)


def test_who_was_preempted_is_bound_ahead_only_after_a_while() -> None:
    where = cluster(full("a"), full("b"), full("c"), full("d"))
    policy = replace(PLAIN, ahead=1, aged_share=1.0)
    assert list(bind(preempted(1000, 1000), where, policy)) == ["r1"]
    assert list(bind(preempted(1000, 1000, waited_s=39.9), where, policy)) == ["r1"]
    assert set(bind(preempted(1000, 1000, waited_s=40.0), where, policy)) == {"r0", "r1"}


@pytest.mark.parametrize(("later_s", "first"), [(0.0, "r1"), (19.0, "r1"), (21.0, "r0")])
def test_who_was_preempted_stands_back_for_those_who_come_soon_after(later_s: float, first: str) -> None:
    where = cluster(instance("a", held=1000, running=2))
    policy = replace(PLAIN, ahead=0)
    assert list(bind(preempted(500, 500, waited_s=30.0, later_s=later_s), where, policy)) == [first]
    assert list(bind(preempted(500, 500, waited_s=30.0, later_s=later_s), where, replace(policy, stand_back_s=0.0))) == ["r0"]


def test_nobody_stands_back_for_a_later_tier() -> None:
    view = preempted(500, 500)
    urgent = replace(view, waiting=(view.waiting[0], replace(view.waiting[1], rank=1)))
    assert list(bind(urgent, cluster(instance("a", held=1000, running=2)), replace(PLAIN, ahead=0))) == ["r0"]


def test_who_was_preempted_starts_at_once_where_room_is() -> None:
    assert bind(preempted(500), cluster(instance("a", held=1000, running=2)))["r0"].instance == "a"


def test_without_backfill_nobody_passes() -> None:
    where = cluster(instance("a", held=1000, running=2))
    policy = replace(PLAIN, backfill=False, ahead=0)
    assert not bind(line(1200, 100), where, policy)
    assert "r1" in bind(line(1200, 100), where, replace(policy, backfill=True))


def test_a_queue_that_fits_entirely_leaves_the_rest_open() -> None:
    assert not bind(line(300), cluster(instance("a", held=800, running=1, waiting=(200, 100))))["r0"].ahead
    blocked = cluster(instance("a", held=800, running=1, waiting=(900,)), instance("b", held=1600, running=1))
    assert bind(line(300), blocked)["r0"].instance == "b"


def test_a_full_batch_takes_nobody() -> None:
    assert not bind(line(10), cluster(instance("a", held=100, running=8, max_batch=8)))


def test_price_separates_long_from_short() -> None:
    """The short one joins the short ones; freeness would send it to the emptier instance, where a long context slows it."""
    where = cluster(instance("a", held=600, running=1, cost=COST), instance("b", held=650, running=8, cost=COST))
    assert bind(line(400), where, LateBinding(placement="price"))["r0"].instance == "a"
    costly = replace(COST, per_token_s=1e-4)
    long_one = cluster(instance("a", held=900, running=1, cost=costly), instance("b", held=100, running=2, cost=costly))
    assert bind(line(100), long_one, LateBinding(placement="price"))["r0"].instance == "b"


def test_a_head_too_long_for_any_instance_waits() -> None:
    assert not bind(line(1700), cluster(instance("a")))


def test_draining_and_starting_take_nobody() -> None:
    where = cluster(instance("a", state=ViewState.DRAINING), instance("b", state=ViewState.STARTING))
    assert not bind(line(10), where)


def test_when_nobody_reports_outstanding_requests_decide() -> None:
    where = cluster(instance("a", claims=3, state=ViewState.STALE), instance("b", claims=1, state=ViewState.STALE))
    found = bind(line(10_000, 5), where)
    assert list(found.values()) == [Binding(request("r0").request, InstanceId("b"), 1)]
    full = cluster(instance("a", claims=8, max_batch=8, state=ViewState.STALE))
    assert not bind(line(10), full)


def test_model_and_exclusions_are_kept() -> None:
    asked = replace(request("r0", 10), model="other")
    view = LineView((Waiting(asked, 10, 0.0),), 0.0)
    assert not bind(view, cluster(instance("a")))
    left = replace(request("r0", 10), excluded=frozenset({InstanceId("a")}))
    view = LineView((Waiting(left, 10, 0.0),), 0.0)
    assert bind(view, cluster(instance("a"), instance("b")))["r0"].instance == "b"


def test_idle_ties_are_spread_fairly() -> None:
    where = cluster(*(instance(name) for name in "abcde"))
    first = Counter(bind(line(10), where, seed=seed)["r0"].instance for seed in range(2000))
    assert len(first) == 5
    assert min(first.values()) > 320


def test_a_burst_does_not_herd() -> None:
    where = cluster(*(instance(name, cost=COST) for name in "abcd"))
    for policy in (LateBinding(placement="price"), LateBinding(placement="freeness")):
        placed = Counter(binding.instance for binding in bind(line(*[50] * 40), where, policy).values())
        assert max(placed.values()) - min(placed.values()) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 9)), min_size=1, max_size=6),
    st.lists(st.integers(1, 1500), max_size=12),
    st.sampled_from(["price", "freeness"]),
)
def test_nobody_who_fits_waits_and_no_memory_is_given_twice(loads: list[tuple[int, int]], demands: list[int], placement: str) -> None:
    """Whatever the cluster: who is not bound ahead has room beside the others, and who is left fits nowhere any more."""
    views = [instance(f"i{n}", held=held if running else 0, running=running, cost=COST) for n, (held, running) in enumerate(loads)]
    policy = replace(PLAIN, placement="price" if placement == "price" else "freeness", growth=0.25)
    found = bind(line(*demands), cluster(*views), policy)

    def kept(requests: int) -> int:
        return int(min(0.25 * 256 * sqrt(requests), 0.06 * 1600)) if requests > 1 else 0

    for view in views:
        here = [binding for binding in found.values() if binding.instance == view.id]
        bound = [demands[int(binding.request[1:])] for binding in here if not binding.ahead]
        blocks = sum(-(-tokens // 16) for tokens in bound)
        requests = view.report.running + len(bound)
        assert blocks == 0 or blocks * 16 + kept(requests) <= view.report.free_tokens
        closed = any(binding.ahead for binding in here)
        room = (view.report.free_tokens - kept(requests + 1)) // 16 - blocks
        unbound = [tokens for n, tokens in enumerate(demands) if f"r{n}" not in found]
        assert closed or all(-(-tokens // 16) > room for tokens in unbound)
    assert sum(binding.ahead for binding in found.values()) <= 2


@pytest.mark.parametrize("cost", [StepCost(), COST])
def test_immediate_binds_one_at_a_time_with_the_dispatch_policy(cost: StepCost) -> None:
    where = cluster(instance("a", held=500, running=2, cost=cost), instance("b", cost=cost))
    assert Immediate(LeastMemory()).bind(line(5000, 10), where, Random(1)) == (Binding(request("r0").request, InstanceId("b"), 0),)
    assert Immediate(LeastMemory()).bind(line(), where, Random(1)) == ()
    assert Immediate(LeastMemory()).bind(line(1), ClusterView(), Random(1)) == ()


def test_remembered_sums_change_no_binding() -> None:
    """A policy that has seen many views binds as a fresh one does, and is equal to it."""
    used, chance = LateBinding(), Random(5)
    views = [instance(name) for name in "abc"]
    for seed in range(40):
        at = chance.randrange(len(views))
        views[at] = replace(views[at], claims=chance.randrange(4), claimed_tokens=chance.randrange(400))
        where = ClusterView(tuple(views))
        assert used.bind(line(100, 50), where, Random(seed)) == LateBinding().bind(line(100, 50), where, Random(seed))
    assert used == LateBinding()
    assert hash(used) == hash(LateBinding())


def test_alternatives_are_the_next_best_as_they_were_seen() -> None:
    where = cluster(*(instance(name, held=held, running=2) for name, held in (("a", 900), ("b", 300), ("c", 600), ("d", 1580))))
    view = replace(line(100), alternatives=3)
    (found,) = LateBinding(placement="freeness").bind(view, where, Random(1))
    assert (found.instance, [(other.instance, other.claims_seen) for other in found.others]) == ("b", [("c", 2), ("a", 2)])
    (found,) = LateBinding(placement="freeness").bind(replace(view, alternatives=1), where, Random(1))
    assert [other.instance for other in found.others] == ["c"]
    (found,) = LateBinding(placement="freeness").bind(line(100), where, Random(1))
    assert found.others == ()


def test_alternatives_where_nobody_reports_stay_within_the_batch() -> None:
    views = [instance(name, claims=claims, max_batch=4) for name, claims in (("a", 1), ("b", 0), ("c", 4))]
    where = ClusterView(tuple(replace(view, report=replace(view.report, is_measured=False)) for view in views))
    (found,) = LateBinding().bind(replace(line(100), alternatives=3), where, Random(1))
    assert (found.instance, [other.instance for other in found.others]) == ("b", ["a"])


@pytest.mark.parametrize("weight", [1.0, 10.0])
@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_a_seat_asks_the_price_of_the_formula(weight: float, tokens: int) -> None:
    from gateway.policy.load import standing
    from gateway.policy.price import placement_cost_s
    from gateway.policy.seat import seat_of
    from gateway.policy.tier import Tiers

    view = instance("a", held=700, running=3, waiting=(40,), cost=COST)
    for seat, (requests, held, others) in (
        (seat_of(view, Tiers(), 50.0), (0, 0, 0.0)),
        (seat_of(view, Tiers(), 50.0).taken(90, 10.0, 50.0, ahead=False), (1, 90, 10.0)),
    ):
        sums = standing(view, Tiers())
        said = placement_cost_s(
            COST,
            tokens=sums.tokens + held,
            requests=sums.requests + requests,
            weight=sums.weight + others,
            prompt_tokens=tokens,
            own_weight=weight,
            steps=200.0,
        )
        assert seat.price_s(weight, tokens, 200.0) == pytest.approx(said)


def test_a_seat_that_is_taken_is_as_one_that_is_reported_so() -> None:
    """Else what is bound in one pass would not be bound in two."""
    from gateway.policy.seat import seat_of
    from gateway.policy.tier import Tiers

    view = instance("a", held=320, running=2)
    seat = seat_of(view, Tiers(), 40.0)
    for count in range(1, 6):
        seat = seat.taken(64, 1.0, 40.0, ahead=False)
        claimed = replace(view, claims=2 + count, claimed_tokens=64 * (2 + count))
        assert (seat.room, seat.claims) == (seat_of(claimed, Tiers(), 40.0).room, claimed.claims)


def test_no_head_is_bound_ahead_where_another_was_bound_in_the_same_pass() -> None:
    """That one may be another gateway's to claim, and would find its room taken."""
    where = cluster(instance("a", held=1100, running=3), full("b"))
    found = bind(line(300, 900), where)
    assert (found["r0"].instance, found["r0"].ahead) == ("a", False)
    assert (found["r1"].instance, found["r1"].ahead) == ("b", True)
    alone = cluster(instance("a", held=1100, running=3))
    assert list(bind(line(300, 900), alone)) == ["r0"]
