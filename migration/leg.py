"""PURE. What a request is called while it travels: request ids, instance ids and legs."""

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
"""The gateway's id of a request; the same on every instance the request visits."""

InstanceId = NewType("InstanceId", str)
"""The id of one engine with its llumlet."""


@dataclass(frozen=True, slots=True, order=True)
class Leg:
    """One stay of a request on one instance.

    `epoch` starts at 0 and rises at each hand-over: by one, or by more if attempts in between came to nothing (an epoch that was tried is
    never used again). Whoever sees a message or an event of an older epoch drops it.
    """

    request: RequestId
    epoch: int

    def next(self) -> "Leg":
        """The next leg to try."""
        return Leg(self.request, self.epoch + 1)
