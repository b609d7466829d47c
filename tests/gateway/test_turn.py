"""What control events mean for the stream they come in."""

import pytest

from gateway.control import Control, Head, Kept, Lost, Moved, Moving, Preempted, Released
from gateway.errors import UpstreamBroken, UpstreamFailed, UpstreamLetGo, UpstreamPreempted
from gateway.turn import Turn, turn_of
from migration.leg import InstanceId


@pytest.mark.parametrize(
    ("control", "attached_epoch", "expected"),
    [
        (Head(200, ()), None, None),
        (Moving(1, InstanceId("b"), "http://b"), None, None),
        (Kept(1), 1, None),
        (Kept(1), None, None),
        (Moved(1), 1, Turn.SWITCH),
        (Lost("x"), 1, Turn.SWITCH),
    ],
)
def test_it_goes_on_here_or_there(control: Control, attached_epoch: int | None, expected: Turn | None) -> None:
    assert turn_of(control, attached_epoch, lambda: None) is expected


@pytest.mark.parametrize(
    ("control", "attached_epoch", "error"),
    [
        (Moved(1), None, UpstreamBroken),
        (Moved(2), 1, UpstreamBroken),
        (Lost("x"), None, UpstreamLetGo),
        (Released("x"), None, UpstreamLetGo),
        (Released("x"), 1, UpstreamLetGo),
    ],
)
def test_nothing_goes_on(control: Control, attached_epoch: int | None, error: type[UpstreamFailed]) -> None:
    with pytest.raises(error):
        turn_of(control, attached_epoch, lambda: None)


def test_a_preempted_request_leaves_unless_it_moves_or_could_not_be_gone_on_with() -> None:
    with pytest.raises(UpstreamPreempted):
        turn_of(Preempted(), None, lambda: None)
    assert turn_of(Preempted(), 1, lambda: None) is None
    assert turn_of(Preempted(), None, lambda: "logprobs") is None
