"""Migrations between two scripted instances that something befalls: lost messages, deaths, clients that leave, deadlines."""

import asyncio
from dataclasses import replace

import pytest

from migration.errors import ChannelError, ChannelUnknown, RequestEnded
from migration.leg import Leg
from migration.plan import MigrationResult
from migration.ports import Phase
from tests.migration.conftest import World
from tests.migration.outcomes import NEW, OLD, assert_moved, assert_stayed, outcome_of
from tests.migration.scripted import PROMPT_TOKENS, REQUEST, SETTINGS, until


@pytest.mark.parametrize("kind", ["prepare", "reserve", "commit"])
async def test_repeated_messages_change_nothing(world: World, kind: str) -> None:
    migration = world.migration()
    migration.link.faults = {kind: ["twice"]}
    outcome = await migration.run()
    assert_moved(world, outcome, count=30, computed=PROMPT_TOKENS + 29)


@pytest.mark.parametrize("kind", ["prepare", "reserve"])
@pytest.mark.parametrize("fault", ["lost", "unanswered"])
async def test_lost_message_before_the_commit_leaves_the_request_here(world: World, kind: str, fault: str) -> None:
    migration = world.migration()
    migration.link.faults = {kind: [fault], "cancel": ["unanswered"]}
    await assert_stayed(world, migration, await migration.run(), MigrationResult.FAILED, "link")
    assert world.owners() == [("a", OLD)]
    assert migration.link.said.count("cancel") == 2


async def test_lost_committed_is_resolved_by_asking(world: World) -> None:
    migration = world.migration()
    migration.link.faults = {"commit": ["unanswered"], "query": ["lost", "unanswered"]}
    outcome = await migration.run()
    assert_moved(world, outcome, count=30, computed=PROMPT_TOKENS + 29)
    assert migration.link.said.count("query") == 3
    assert migration.names == ["moving", "moved"]


async def test_lost_commit_is_revoked_and_the_request_thawed(world: World) -> None:
    migration = world.migration()
    migration.link.faults = {"commit": ["lost"]}
    await assert_stayed(world, migration, await migration.run(), MigrationResult.FAILED, "link")
    assert world.owners() == [("a", OLD)]
    assert "query" in migration.link.said


async def test_destination_dead_while_frozen(world: World) -> None:
    migration = world.migration()
    migration.link.faults = {"commit": ["dead"]}
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.FAILED, "peer_gone")
    assert world.owners() == [("a", OLD)]
    assert migration.names == ["moving", "kept"]


async def test_destination_dies_after_it_committed(world: World) -> None:
    """A dead process owns nothing: the source goes on."""
    migration = world.migration()
    migration.link.faults = {"commit": ["dies"]}
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.FAILED, "link")
    assert not world.a.requests[OLD].frozen
    assert migration.names == ["moving", "kept"]


async def test_destination_silent_after_commit_is_never_doubled(world: World) -> None:
    world.clock.step_s = 1.0
    migration = world.migration()
    migration.link.faults = {"commit": ["unanswered"], "query": ["lost"] * 100}
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.LOST, "unresolved")
    assert world.a.requests[OLD].frozen
    assert world.owners() == [("b", NEW)]
    assert migration.names == ["moving", "lost"]
    assert not migration.pair.order.locked()


async def test_last_blocks_that_fail_are_noticed_by_the_destination(world: World) -> None:
    migration = world.migration(2)
    world.a.fail["send_blocks"] = ChannelError()
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "aborted")
    assert world.owners() == [("a", OLD)]


async def test_blocks_that_fail_while_copied(world: World) -> None:
    migration = world.migration()
    world.a.fail["send_blocks"] = ChannelError()
    await assert_stayed(world, migration, await migration.run(), MigrationResult.FAILED, "channel")
    assert world.owners() == [("a", OLD)]


@pytest.mark.parametrize("where", ["accept", "send"])
async def test_unknown_channel_is_opened_afresh_under_a_new_epoch(world: World, where: str) -> None:
    if where == "accept":
        world.b.fail["accept_channel"] = ChannelUnknown()
    else:
        world.a.fail["send_blocks"] = ChannelUnknown()
    outcome = await world.migration().run()
    assert outcome.result is MigrationResult.MOVED
    assert outcome.epoch == 2
    assert [fresh for _, fresh in world.a.channels] == [False, True]
    await until(lambda: world.at_b.arriving == 0)
    assert world.owners() == [("b", Leg(REQUEST, 2))]


async def test_unknown_channel_twice_is_final(world: World) -> None:
    world.b.fail["accept_channel"] = ChannelUnknown()
    migration = world.migration()

    def again() -> None:
        world.b.fail["accept_channel"] = ChannelUnknown()

    world.b.gates.hooks["discard"] = again
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "channel_unknown")
    assert len(world.a.channels) == 2


POINTS = ["look", "offer_channel", "announce_moving", "send_blocks", "freeze"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("tokens", [2, 30])
async def test_client_that_leaves_ends_the_migration_at_once(world: World, point: str, tokens: int) -> None:
    """llumnix-ray#211, #293: an abort during a migration hung or was lost."""
    world.a.gates.close(point)
    migration = world.migration(tokens)
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(outcome_of(migration))
        await world.a.gates.wait_reached(point)
        world.a.requests[OLD].ended.set()
    assert world.a.gates.reached.count("thaw") == 0
    outcome = moving.result()
    assert (outcome.result, outcome.reason) == (MigrationResult.ENDED, "request_ended")
    await until(lambda: world.at_b.arriving == 0)
    world.assert_nothing_held()
    assert world.owners() == []


@pytest.mark.parametrize("point", ["admit", "reserve", "receive_blocks", "adopt", "activate"])
async def test_client_that_leaves_while_the_destination_works(world: World, point: str) -> None:
    world.b.gates.close(point)
    migration = world.migration()
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(outcome_of(migration))
        await world.b.gates.wait_reached(point)
        world.a.requests[OLD].ended.set()
        await asyncio.sleep(0)
        world.b.gates.open(point)
    outcome = moving.result()
    assert (outcome.result, outcome.reason) == (MigrationResult.ENDED, "request_ended")
    await until(lambda: world.at_b.arriving == 0)
    assert world.owners() in ([], [("b", NEW)])  # an owner already: its gateway, gone too, ends it


@pytest.mark.parametrize("left", [True, False])
async def test_client_that_leaves_is_heard_of_by_the_destination_first(world: World, left: bool) -> None:
    """Its gateway hangs up on both sides: what the destination refuses then is no fault of anyone's."""
    migration = world.migration()

    def hang_up() -> None:
        world.b.requests[NEW].ended.set()

    def hear_of_it() -> None:
        if left:
            world.a.requests[OLD].ended.set()

    world.a.gates.hooks["freeze"] = hang_up
    world.a.gates.hooks["thaw"] = hear_of_it
    outcome = await migration.run()
    ended, refused = (MigrationResult.ENDED, "request_ended"), (MigrationResult.REFUSED, "dropped")
    assert (outcome.result, outcome.reason) == (ended if left else refused)
    await until(lambda: world.at_b.arriving == 0)


@pytest.mark.parametrize("point", ["look", "wait_first_token", "send_blocks", "freeze"])
async def test_request_that_finishes_ends_the_migration(world: World, point: str) -> None:
    migration = world.migration(0 if point == "wait_first_token" else 30, Phase.PREFILL if point == "wait_first_token" else Phase.DECODE)
    world.a.fail[point] = RequestEnded()
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.ENDED, "request_ended")
    await until(lambda: world.at_b.arriving == 0)


async def test_freeze_that_takes_too_long_is_thawed(world: World) -> None:
    world.a.gates.close("freeze")
    migration = world.migration()
    migration.settings = replace(SETTINGS, freeze_timeout_s=0.05)
    await assert_stayed(world, migration, await migration.run(), MigrationResult.FAILED, "timeout")
    assert "thaw" in world.a.gates.reached
    assert world.owners() == [("a", OLD)]


async def test_request_that_cannot_be_thawed_is_given_up(world: World) -> None:
    world.a.fail["thaw"] = RuntimeError("a bug")
    migration = world.migration()
    migration.link.faults = {"commit": ["lost"]}
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.LOST, "not_thawed")
    assert migration.names == ["moving", "lost"]


async def test_stage_that_takes_too_long(world: World) -> None:
    world.a.gates.close("send_blocks")
    migration = world.migration()
    migration.settings = replace(SETTINGS, copy_slack_s=0.05)
    await assert_stayed(world, migration, await migration.run(), MigrationResult.FAILED, "timeout")


async def test_silent_link_is_bounded(world: World) -> None:
    world.b.gates.close("admit")
    migration = world.migration()
    migration.settings = replace(SETTINGS, prepare_timeout_s=0.05)
    outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.FAILED, "link")
    await until(lambda: world.at_b.arriving == 0)
    world.assert_nothing_held()


@pytest.mark.parametrize("point", [*POINTS, "reserve_at_b", "activate_at_b"])
async def test_cancelled_session_puts_everything_back(world: World, point: str) -> None:
    engine = world.b if point.endswith("_at_b") else world.a
    point = point.removesuffix("_at_b")
    engine.gates.close(point)
    migration = world.migration()
    moving = asyncio.get_running_loop().create_task(outcome_of(migration))
    await engine.gates.wait_reached(point)
    moving.cancel()
    if engine is world.b:  # what the source waits for here is cancelled with it
        await asyncio.sleep(0)
        engine.gates.open(point)
    with pytest.raises(asyncio.CancelledError):
        await moving
    await until(lambda: world.at_b.arriving == 0)
    assert not migration.pair.order.locked()
    if point == "activate":  # the hand-over was under way: it ends one way, not half
        assert world.owners() == [("b", NEW)]
        assert migration.names == ["moving", "moved"]
    else:
        world.assert_nothing_held()
        assert world.owners() == [("a", OLD)]
