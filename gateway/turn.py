"""PURE. How one instance's stream of an answer ends."""

from enum import Enum, auto

from gateway.control import Control, Lost, Moved, Released
from gateway.errors import UpstreamBroken, UpstreamLetGo


class Turn(Enum):
    """What is next."""

    COMPLETE = auto()
    SWITCH = auto()
    """Go on with the attachment."""


def turn_of(control: Control, attached_epoch: int | None) -> Turn | None:
    """What a control event means for the stream it came in; None: it goes on. `attached_epoch`: of the attachment, if there is one.

    Raises UpstreamBroken, UpstreamLetGo: it is over, and no attachment goes on.
    """
    match control:
        case Moved(epoch) if epoch != attached_epoch:
            raise UpstreamBroken("The request moved to an instance that was not announced.")
        case Lost(reason) if attached_epoch is None:
            raise UpstreamLetGo(f"The instance lost the request ({reason}).")
        case Released(reason):
            raise UpstreamLetGo(f"The instance let the request go ({reason}).")
        case Moved() | Lost():
            return Turn.SWITCH
    return None
