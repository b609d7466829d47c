"""What the fake engine knows of one open flight: its generations, whether it is over, and the receives that write into its memory."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from backend.engine.fake.generation import Generation
from backend.engine.flight import Flight


class Stay:
    """One leg's stay on this engine."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.generations: list[Generation] = []
        self.over = asyncio.Event()
        """The request has finished, or its HTTP exchange here is over."""
        self.quiet = asyncio.Event()
        """No receive is running."""
        self.quiet.set()
        self._receives = 0

    @property
    def generation(self) -> Generation:
        """The one and only; a flight with several is not movable."""
        return self.generations[0]

    def add(self, generation: Generation) -> None:
        """The engine works on this, too, for the flight."""
        self.generations.append(generation)
        generation.on_end = self._one_ended

    def _one_ended(self) -> None:
        if all(generation.ended.is_set() for generation in self.generations):
            self.over.set()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """A receive is running meanwhile."""
        self._receives += 1
        self.quiet.clear()
        try:
            yield
        finally:
            self._receives -= 1
            if not self._receives:
                self.quiet.set()
