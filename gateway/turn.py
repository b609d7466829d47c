"""How one instance's stream of an answer ended."""

from enum import Enum, auto


class Turn(Enum):
    """What is next."""

    COMPLETE = auto()
    SWITCH = auto()
    """Go on with the attachment."""
