"""Silence and stopped reports together make a dead instance."""

import pytest

from backend.registry.instance import StepCost
from gateway.liveness import is_hung, patience_s
from gateway.policy.view import ClusterView, InstanceView, ViewState
from migration.leg import InstanceId
from tests.backend.registry.reports import a_report


def cluster(*, age_s: float, other_age_s: float = 0.1, step_s: float = 0.01, gone: bool = False) -> ClusterView:
    views = [InstanceView(a_report("a", cost=StepCost(last_step_s=step_s)), ViewState.READY, age_s, 0, 0)]
    others = [InstanceView(a_report("b"), ViewState.READY, other_age_s, 0, 0)]
    return ClusterView(tuple(others if gone else views + others))


def hung(silent_s: float, seen: ClusterView, tier: str = "normal") -> bool:
    return is_hung(InstanceId("a"), silent_s, tier, seen, hang_timeout_s=3.0, report_stale_s=5.0)


def test_silent_and_without_reports() -> None:
    assert hung(3.5, cluster(age_s=5.5))
    assert hung(3.5, cluster(age_s=0, gone=True))


def test_a_long_prefill_is_silent_and_reports() -> None:
    assert not hung(100.0, cluster(age_s=1.0))


def test_a_stream_that_goes_on_needs_no_reports() -> None:
    assert not hung(0.5, cluster(age_s=100.0))


def test_nobody_reports_so_it_is_the_store_that_fails() -> None:
    assert not hung(100.0, cluster(age_s=6.0, other_age_s=6.0))
    assert not hung(100.0, ClusterView())


@pytest.mark.parametrize(("tier", "expected"), [("high", True), ("normal", False), ("batch", False), ("odd", False)])
def test_urgent_requests_wait_less(tier: str, expected: bool) -> None:
    assert hung(2.0, cluster(age_s=5.5), tier) is expected


def test_slow_engines_are_given_twenty_of_their_steps() -> None:
    assert patience_s("normal", 3.0, 0.5) == 10.0
    assert not hung(9.0, cluster(age_s=5.5, step_s=0.5))
    assert hung(10.5, cluster(age_s=5.5, step_s=0.5))
