"""Instances of whose load nothing is known: unknown is neither full nor empty."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from backend.registry.instance import InstanceKind
from gateway.policy.dispatch import Cheapest, DispatchPolicy, Freest, LeastLoaded, LeastMemory, RoundRobin
from gateway.policy.line import LateBinding, LineView, Waiting
from gateway.policy.load import scale_freeness
from gateway.policy.rebalance import FreenessPairing
from gateway.policy.view import InstanceView
from migration.leg import InstanceId
from tests.gateway.policy.views import cluster, instance, request


def unknown(name: str, claims: int) -> InstanceView:
    """What a plain server without metrics looks like: figures that are zero because nobody knows them."""
    view = instance(name, capacity=0, claims=claims, claimed_tokens=100 * claims, max_batch=4)
    return replace(view, report=replace(view.report, kind=InstanceKind.PASSIVE, is_measured=False))


@pytest.mark.parametrize("policy", [LeastLoaded(), LeastMemory(), Freest(), Cheapest()])
def test_fewest_outstanding_requests_decide(policy: DispatchPolicy) -> None:
    where = cluster(unknown("a", 3), unknown("b", 1), instance("c", held=100, running=2))
    assert [each.instance for each in policy.order(request(), where, Random(1))] == ["b", "c", "a"]


@pytest.mark.parametrize("policy", [RoundRobin(), LeastLoaded(), LeastMemory(), Freest(), Cheapest()])
def test_equals_share_alike(policy: DispatchPolicy) -> None:
    where = cluster(*(unknown(name, 0) for name in "abcd"))
    firsts = Counter(policy.order(request(), where, Random(seed))[0].instance for seed in range(400))
    assert set(firsts) == {"a", "b", "c", "d"}
    assert min(firsts.values()) > 60


def test_a_line_binds_by_outstanding_requests_up_to_the_batch() -> None:
    line = LineView((Waiting(request("r"), 100, 0.0),), 1.0)
    (binding,) = LateBinding().bind(line, cluster(unknown("a", 2), unknown("b", 1)), Random(1))
    assert (binding.instance, binding.claims_seen, binding.ahead) == (InstanceId("b"), 1, False)
    assert not LateBinding().bind(line, cluster(unknown("a", 4), unknown("b", 4)), Random(1))


def test_nothing_moves_to_or_from_a_passive_instance() -> None:
    full = instance("a", held=1590, running=4)
    empty = instance("b")
    assert FreenessPairing().pairs(cluster(full, empty))
    for at in ("a", "b"):
        views = [replace(each, report=replace(each.report, kind=InstanceKind.PASSIVE)) if each.id == at else each for each in (full, empty)]
        assert not FreenessPairing().pairs(cluster(*views))


def test_scaling_goes_by_what_is_known() -> None:
    assert scale_freeness([unknown("a", 3), instance("b", held=600, running=2)]) == 500.0
