"""Two instances, a and b, and the way from a to b."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from migration.leg import Leg
from migration.plan import MigrationMode
from migration.ports import Phase
from migration.reception import Receptions
from tests.migration.scripted import RECEPTION_SETTINGS, Clock, Migration, ScriptedEngine, ScriptedLink, Wire


@dataclass
class World:
    """Both engines run; b's Receptions are open."""

    a: ScriptedEngine
    b: ScriptedEngine
    at_a: Receptions
    at_b: Receptions
    clock: Clock

    def migration(self, tokens: int = 30, phase: Phase = Phase.DECODE, mode: MigrationMode = MigrationMode.LIVE) -> Migration:
        """From a to b, of a request with so many output tokens."""
        return Migration(self.a, ScriptedLink(self.at_b), self.a.start(tokens, phase), mode=mode, clock=self.clock)

    def assert_nothing_held(self) -> None:
        """Neither a frozen request nor a reservation anywhere."""
        for engine in (self.a, self.b):
            assert not [leg for leg, running in engine.requests.items() if running.frozen and running.owned and not running.ended.is_set()]
            assert not [leg for leg, running in engine.requests.items() if not running.owned]
        assert self.at_a.arriving == self.at_b.arriving == 0

    def owners(self) -> list[tuple[str, Leg]]:
        """Who may emit tokens now."""
        return [
            (engine.instance, leg)
            for engine in (self.a, self.b)
            for leg, running in engine.requests.items()
            if running.owned and not running.frozen and not running.ended.is_set()
        ]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock, wire = Clock(), Wire()
    a, b = ScriptedEngine("a", wire), ScriptedEngine("b", wire)
    async with Receptions(a, a, RECEPTION_SETTINGS, clock) as at_a, Receptions(b, b, RECEPTION_SETTINGS, clock) as at_b:
        yield World(a, b, at_a, at_b, clock)
