"""PURE. Virtual time: what is to happen, in the order of its time, and of its planning among equals."""

from collections.abc import Callable
from heapq import heappop, heappush


class Loop:
    """`now_s` moves only by running events."""

    __slots__ = ("_events", "_planned", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Plan an action; a time that is over means now."""
        self._planned += 1
        heappush(self._events, (when_s if when_s > self.now_s else self.now_s, self._planned, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan an action `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done`, asked after each event, or nothing is planned any more."""
        events = self._events
        while events:
            self.now_s, _, action = heappop(events)
            action()
            if done():
                return
