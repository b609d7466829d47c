from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import InstanceState
from backend.registry.store import Sighting
from gateway.policy.dispatch import LeastLoaded
from gateway.policy.view import ClusterView, RequestView, ViewState, assemble
from migration.leg import InstanceId, RequestId
from tests.gateway.conftest import report

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
    view = assemble([seen("a", 3, age_s=1.0)], report_stale_s=5.0, aged_s=4.5, drift={InstanceId("a"): drift})
    assert view.instances[0].claims == claims
    assert view.instances[0].state is ViewState.STALE
