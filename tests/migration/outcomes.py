"""How a migration between the two scripted instances may end, and what is true then."""

from migration.leg import Leg
from migration.plan import MigrationOutcome, MigrationResult
from tests.migration.conftest import World
from tests.migration.scripted import REQUEST, Migration, until

OLD, NEW = Leg(REQUEST, 0), Leg(REQUEST, 1)


def tokens(count: int) -> list[int]:
    return list(range(1, count + 1))


def assert_moved(world: World, outcome: MigrationOutcome, *, count: int, computed: int) -> None:
    assert (outcome.result, outcome.reason) == (MigrationResult.MOVED, "")
    assert world.b.activated == [(NEW, tuple(tokens(count)), computed, (b"sampler",))]
    assert world.b.replayed[NEW] == tokens(count)
    assert world.b.finished == [NEW]
    assert world.a.requests[OLD].frozen
    assert world.owners() == [("b", NEW)]
    assert world.at_b.arriving == 0


async def assert_stayed(world: World, migration: Migration, outcome: MigrationOutcome, result: MigrationResult, reason: str) -> None:
    assert (outcome.result, outcome.reason) == (result, reason)
    await until(lambda: world.at_b.arriving == 0)
    world.assert_nothing_held()
    assert not world.b.finished
    assert migration.names in ([], ["moving", "kept"])
    assert not migration.pair.order.locked()


async def outcome_of(migration: Migration) -> MigrationOutcome:
    return await migration.run()
