"""What a failure means, decided by table."""

import pytest

from gateway.attempts import Attempts, Decision, Next
from gateway.errors import UpstreamBroken, UpstreamPreempted, UpstreamSilent
from gateway.policy.view import ClusterView, InstanceView, ViewState
from migration.leg import InstanceId
from tests.backend.registry.reports import a_report

BROKEN, SILENT = UpstreamBroken(), UpstreamSilent()


def cluster(**incarnations: str) -> ClusterView:
    views = (InstanceView(a_report(name, incarnation=one), ViewState.READY, 0.0, 0, 0) for name, one in incarnations.items())
    return ClusterView(tuple(views))


def fail(
    attempts: Attempts, failure: UpstreamBroken | UpstreamSilent = BROKEN, *, shown: bool = True, why_not: str | None = None
) -> Decision:
    return attempts.decide(failure, 5.0, shown=shown, tokens=int(shown), why_not=why_not)


def test_before_the_first_byte_it_begins_anew_until_the_attempts_are_used_up() -> None:
    attempts = Attempts(3, 8)
    assert [fail(attempts, one, shown=False).next for one in (BROKEN, BROKEN, SILENT)] == [Next.ANEW, Next.ANEW, Next.SHOW]
    assert attempts.failure is SILENT
    assert attempts.resuming is None


def test_after_it_the_request_goes_on_and_the_first_failure_of_an_outage_is_kept() -> None:
    attempts = Attempts(3, 8)
    assert fail(attempts) == Decision(Next.RESUME)
    assert (attempts.resuming, attempts.failed_at_s) == ("instance_lost", 5.0)
    assert fail(attempts, SILENT) == Decision(Next.RESUME)
    assert fail(attempts, SILENT) == Decision(Next.SHOW, ("failed", "instance_silent"))
    assert attempts.failure is BROKEN


def test_every_new_event_makes_up_for_the_failures_before_it() -> None:
    attempts = Attempts(2, 8)
    for _ in range(5):
        assert fail(attempts) == Decision(Next.RESUME)
        assert attempts.joined() == "instance_lost"
        attempts.progressed()
    assert attempts.joined() is None


def test_to_be_preempted_uses_nothing_up() -> None:
    attempts, preempted = Attempts(1, 0), UpstreamPreempted()
    epochs = [0]
    for _ in range(5):
        assert attempts.decide(preempted, 5.0, shown=True, tokens=3, why_not=None) == Decision(Next.RESUME)
        assert attempts.in_line
        assert attempts.under_way
        epochs.append(attempts.next_epoch())
        assert attempts.joined() == "preempted"
        attempts.progressed()
    assert epochs == sorted(set(epochs))
    fail(attempts)
    assert not attempts.in_line


def test_a_request_that_fells_one_instance_after_the_other_is_stopped() -> None:
    attempts = Attempts(3, 2)
    for _ in range(2):
        fail(attempts)
        attempts.progressed()
    assert fail(attempts) == Decision(Next.SHOW, ("refused", "too_often"))


@pytest.mark.parametrize(("shown", "expected"), [(True, Next.SHOW), (False, Next.ANEW)])
def test_what_cannot_be_resumed_begins_anew_if_nothing_was_shown(shown: bool, expected: Next) -> None:
    decision = Attempts(3, 8).decide(BROKEN, 0.0, shown=shown, tokens=7, why_not="logprobs")
    assert decision == Decision(expected, ("refused", "logprobs"))


def test_epochs_only_rise_and_leave_those_of_moves_behind() -> None:
    attempts = Attempts(9, 9)
    assert attempts.next_epoch() == 0
    attempts.announced(3)
    fail(attempts)
    assert attempts.next_epoch() == 1000
    attempts.announced(1001)
    fail(attempts)
    assert attempts.next_epoch() == 2000


def test_an_instance_that_failed_is_not_asked_again_unless_it_was_started_anew() -> None:
    attempts = Attempts(3, 8)
    attempts.ask(cluster(a="1").instances[0])
    attempts.blame(InstanceId("a"), cluster(a="2", b="1"))
    assert attempts.excluded(cluster(a="1", b="1")) == {"a"}
    assert attempts.excluded(cluster(a="2", b="1")) == set()
    attempts.blame(InstanceId("b"), cluster(a="2", b="1"))  # the request had moved there
    assert attempts.excluded(cluster(a="2", b="1")) == {"b"}
