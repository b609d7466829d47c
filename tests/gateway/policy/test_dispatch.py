from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import InstanceState
from backend.registry.store import Sighting
from gateway.policy.dispatch import Cheapest, DispatchPolicy, Freest, LeastLoaded, LeastMemory, RoundRobin, room_tokens
from gateway.policy.view import ClusterView, Drift, RequestView, ViewState, assemble
from migration.leg import InstanceId, RequestId
from tests.gateway.conftest import report
from tests.gateway.policy.views import COST, instance, request
from tests.gateway.policy.views import cluster as cluster_of

REQUEST = RequestView(RequestId("r"), "m", "normal", 10)


def seen(name: str, claims: int = 0, age_s: float = 0.0, state: InstanceState = InstanceState.READY, running: int = 0) -> Sighting:
    return Sighting(report(name, state=state, running=running), age_s, claims, 0)


def cluster(*sightings: Sighting) -> ClusterView:
    return assemble(sightings, report_stale_s=5.0, aged_s=0.0, drift={})


def order(view: ClusterView, request: RequestView = REQUEST) -> list[str]:
    return [candidate.instance for candidate in LeastLoaded().order(request, view, Random(1))]


def test_claims_then_engine_load() -> None:
    assert order(cluster(seen("a", 2), seen("b", 1, running=9), seen("c", 1, running=3))) == ["c", "b", "a"]


def test_draining_starting_and_stale_are_left_out() -> None:
    view = cluster(
        seen("a", state=InstanceState.DRAINING), seen("b", state=InstanceState.STARTING), seen("c", age_s=6.0), seen("d", claims=50)
    )
    assert [one.state for one in view.instances] == [ViewState.DRAINING, ViewState.STARTING, ViewState.STALE, ViewState.READY]
    assert order(view) == ["d"]


def test_all_stale_means_use_them_all_but_never_draining_ones() -> None:
    view = cluster(
        seen("a", 1, age_s=99), seen("b", age_s=99), seen("c", state=InstanceState.DRAINING), seen("d", state=InstanceState.STARTING)
    )
    assert order(view) == ["b", "a"]


def test_excluded_and_other_models() -> None:
    view = cluster(seen("a"), seen("b"))
    assert order(view, RequestView(RequestId("r"), "m", "normal", 0, frozenset({InstanceId("a")}))) == ["b"]
    assert order(view, RequestView(RequestId("r"), "x", "normal", 0)) == []
    assert len(order(view, RequestView(RequestId("r"), None, "normal", 0))) == 2


def test_idle_ties_are_broken_fairly() -> None:
    view, rng = cluster(*(seen(name) for name in "abcde")), Random(7)
    first = Counter(LeastLoaded().order(REQUEST, view, rng)[0].instance for _ in range(5000))
    assert all(900 < count < 1100 for count in first.values())
    assert len(first) == 5


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8), st.integers())
def test_order_is_a_sorted_permutation(loads: list[tuple[int, int]], seed: int) -> None:
    view = cluster(*(seen(f"i{n}", claims, running=running) for n, (claims, running) in enumerate(loads)))
    ranked = LeastLoaded().order(REQUEST, view, Random(seed))
    assert sorted(candidate.instance for candidate in ranked) == sorted(one.id for one in view.instances)
    by_id = {one.id: (one.claims, one.report.running) for one in view.instances}
    keys = [by_id[candidate.instance] for candidate in ranked]
    assert keys == sorted(keys)
    assert all(candidate.claims_seen == by_id[candidate.instance][0] for candidate in ranked)


@pytest.mark.parametrize(("drift", "claims"), [(2, 5), (-1, 2), (-9, 0)])
def test_view_counts_what_came_and_went_since(drift: int, claims: int) -> None:
    view = assemble([seen("a", 3, age_s=1.0)], report_stale_s=5.0, aged_s=4.5, drift={InstanceId("a"): Drift(drift, 10 * drift)})
    assert (view.instances[0].claims, view.instances[0].claimed_tokens) == (claims, max(0, 10 * drift))
    assert view.instances[0].state is ViewState.STALE


def best(policy: DispatchPolicy, view: ClusterView, asked: RequestView = REQUEST) -> str:
    return policy.order(asked, view, Random(1))[0].instance


def test_round_robin_counts_arrivals_and_is_fair_if_nobody_counts() -> None:
    view = cluster(seen("a"), seen("b"), seen("c"))
    assert [best(RoundRobin(), view, request(sequence=n)) for n in range(4)] == ["a", "b", "c", "a"]
    rng = Random(3)
    first = Counter(RoundRobin().order(REQUEST, view, rng)[0].instance for _ in range(3000))
    assert min(first.values()) > 900
    assert RoundRobin().order(REQUEST, ClusterView(), rng) == ()


def test_infaas_goes_by_memory_in_use_and_waited_for() -> None:
    busy_but_small, queued = instance("a", held=400, running=20), instance("b", held=100, running=1, waiting=(600,))
    assert best(LeastMemory(), cluster_of(busy_but_small, queued), request()) == "a"


def test_llumnix_goes_by_freeness() -> None:
    many_short, one_long = instance("a", held=400, running=20), instance("b", held=1000, running=2)
    assert best(Freest(), cluster_of(many_short, one_long), request()) == "b"
    assert best(LeastMemory(), cluster_of(many_short, one_long), request()) == "a"


def test_claims_under_way_keep_gateways_from_herding() -> None:
    crowd = instance("a", claims=9, claimed_tokens=900)
    for policy in (LeastMemory(), Freest(), Cheapest()):
        assert best(policy, cluster_of(crowd, instance("b", held=16, running=1)), request()) == "b"


def test_cheapest_takes_the_cheapest_place_with_room_and_goes_by_freeness_where_nothing_is_measured() -> None:
    short, long = instance("a", held=800, running=8, cost=COST), instance("b", held=900, running=1, cost=COST)
    full = instance("c", held=1590, running=1, cost=COST)
    assert best(Cheapest(), cluster_of(short, long, full), request()) == "b"
    assert Cheapest().order(request(), cluster_of(short, long, full), Random(1))[-1].instance == "c"
    assert best(Cheapest(), cluster_of(instance("a", held=800, running=2), instance("b", held=800, running=8)), request()) == "a"


@pytest.mark.parametrize("policy", [RoundRobin(), LeastMemory(), Freest(), Cheapest()])
def test_every_policy_skips_what_cannot_take_it(policy: DispatchPolicy) -> None:
    view = cluster(seen("a", state=InstanceState.DRAINING), seen("b"), seen("c", age_s=9.0))
    assert [candidate.instance for candidate in policy.order(REQUEST, view, Random(1))] == ["b"]


def test_room_counts_the_queue_claims_and_the_batch() -> None:
    assert room_tokens(instance("a")) == 1600
    assert room_tokens(instance("a", held=800, running=4)) == 800
    assert room_tokens(instance("a", held=800, running=4, waiting=(160,))) == 640
    assert room_tokens(instance("a", held=800, running=4, claims=5, claimed_tokens=1000)) == 592
    assert room_tokens(instance("a", held=800, running=4, max_batch=4)) < 0
