"""PURE. How one instance's stream of an answer ends."""

from collections.abc import Callable
from enum import Enum, auto

from gateway.control import Control, Lost, Moved, Preempted, Released
from gateway.errors import UpstreamBroken, UpstreamLetGo, UpstreamPreempted


class Turn(Enum):
    """What is next."""

    COMPLETE = auto()
    SWITCH = auto()
    """Go on with the attachment."""


def turn_of(control: Control, attached_epoch: int | None, why_not_resumable: Callable[[], str | None]) -> Turn | None:
    """What a control event means for the stream it came in; None: it goes on. `attached_epoch`: of the attachment, if there is one.

    Raises UpstreamBroken, UpstreamLetGo: it is over, and no attachment goes on. UpstreamPreempted: it is better closed.
    """
    match control:
        case Moved(epoch) if epoch != attached_epoch:
            raise UpstreamBroken("The request moved to an instance that was not announced.")
        case Lost(reason) if attached_epoch is None:
            raise UpstreamLetGo(f"The instance lost the request ({reason}).")
        case Released(reason):
            raise UpstreamLetGo(f"The instance let the request go ({reason}).")
        case Preempted() if attached_epoch is None and why_not_resumable() is None:
            raise UpstreamPreempted("The instance has taken the request's memory away.")
        case Moved() | Lost():
            return Turn.SWITCH
    return None
