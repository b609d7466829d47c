from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import TierLoad
from gateway.policy.load import dispatch_freeness, head_room_tokens, rebalance_freeness, scale_freeness, standing, unseen
from gateway.policy.tier import Tiers
from gateway.policy.view import ViewState
from tests.gateway.policy.views import instance


def test_freeness_is_free_tokens_per_running_request() -> None:
    assert dispatch_freeness(instance("a", held=600, running=4), {}) == 250.0
    assert dispatch_freeness(instance("a"), {}) == 1600.0


def test_the_three_variants_count_what_waits_differently() -> None:
    view = instance("a", held=600, running=2, waiting=(800, 400))
    assert dispatch_freeness(view, {}) == (1000 - 1200) / 2
    assert rebalance_freeness(view, {}) == (1000 - 800) / 2
    assert scale_freeness([view]) == 100.0


def test_claims_that_no_report_has_seen_count_for_dispatch_only() -> None:
    view = instance("a", held=600, running=2, claims=5, claimed_tokens=1000)
    assert unseen(view) == (3, 600)
    assert dispatch_freeness(view, {}) == (1000 - 600) / 2
    assert rebalance_freeness(view, {}) == 500.0


def test_fewer_claims_than_requests_is_no_debt() -> None:
    assert unseen(instance("a", held=600, running=2, claims=0, claimed_tokens=0)) == (0, 0)


def test_draining_is_never_free() -> None:
    view = instance("a", state=ViewState.DRAINING)
    assert dispatch_freeness(view, {}) == rebalance_freeness(view, {}) == -inf


def test_a_class_reserves_its_head_room_in_total_once_it_runs() -> None:
    both = (("high", TierLoad(2, 100)), ("normal", TierLoad(1, 100)))
    view = instance("a", held=200, running=3, tiers=both)
    assert head_room_tokens(view.report, {"high": 400}) == 1200
    assert dispatch_freeness(view, {"high": 400}) == (1400 - 1200) / 3
    alone = instance("b", held=200, running=1)
    assert head_room_tokens(alone.report, {"high": 400}) == 0


def test_scale_freeness_is_the_mean_over_those_that_stay() -> None:
    views = [instance("a"), instance("b", held=1600, running=4), instance("c", state=ViewState.DRAINING)]
    assert scale_freeness([*views, instance("d", state=ViewState.STARTING)]) == 800.0
    assert scale_freeness(views[2:]) == inf


def test_standing_sums_everything_that_is_there_or_coming() -> None:
    tiers = (("high", TierLoad(1, 100)), ("normal", TierLoad(2, 200)))
    view = instance("a", held=300, running=3, tiers=tiers, waiting=(50, 30), claims=6, claimed_tokens=600)
    sums = standing(view, Tiers())
    assert (sums.free_tokens, sums.head_tokens, sums.running) == (1300, 50, 3)
    assert (sums.requests, sums.tokens) == (6, 100 + 200 + 80 + 100)
    assert sums.weight == 20 + 2 + 1 + 1 + 1


def test_an_arriving_migration_counts_with_the_memory_it_has_reserved() -> None:
    tiers = (("normal", TierLoad(1, 100)),)
    sums = standing(instance("a", held=500, running=1, tiers=tiers, moves_in=1), Tiers())
    assert (sums.requests, sums.tokens) == (2, 100 + 500 - 100 - 8)


@given(st.integers(0, 1600), st.integers(0, 40), st.lists(st.integers(16, 800), max_size=5), st.integers(0, 30))
def test_dispatch_never_sees_more_than_rebalance(held: int, running: int, waiting: list[int], extra: int) -> None:
    view = instance("a", held=held, running=running, waiting=tuple(waiting), claims=running + len(waiting) + extra, claimed_tokens=4000)
    assert dispatch_freeness(view, {}) <= rebalance_freeness(view, {}) + 1e-9
    assert dispatch_freeness(view, {"normal": 100}) <= dispatch_freeness(view, {})


@pytest.mark.parametrize("state", [ViewState.READY, ViewState.STALE])
def test_freeness_can_be_negative(state: ViewState) -> None:
    assert dispatch_freeness(instance("a", held=1600, running=2, waiting=(500,), state=state), {}) == -250.0
