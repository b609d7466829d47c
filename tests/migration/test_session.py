"""Whole migrations between two scripted instances, in memory."""

import asyncio
from dataclasses import replace

import pytest

from migration.departure import Moved, Moving
from migration.errors import Refused
from migration.leg import InstanceId, Leg
from migration.plan import MigrationMode, MigrationResult
from migration.ports import Phase
from tests.migration.conftest import World
from tests.migration.outcomes import NEW, OLD, assert_moved, assert_stayed, outcome_of, tokens
from tests.migration.scripted import BLOCK_BYTES, LAYOUT, PROMPT_TOKENS, REQUEST, SETTINGS, Migration, ScriptedLink, until


async def test_live_move_takes_two_stages(world: World) -> None:
    world.a.decode_while = {"send_blocks": 3, "freeze": 1}
    migration = world.migration(30)
    outcome = await migration.run()
    assert_moved(world, outcome, count=34, computed=PROMPT_TOKENS + 33)
    assert (outcome.stages, outcome.bytes, outcome.epoch) == (2, 11 * BLOCK_BYTES, 1)
    assert migration.link.said == ["prepare", "reserve", "commit"]
    assert migration.announced == [Moving(1, InstanceId("b"), "http://b"), Moved(1)]


async def test_source_decodes_while_blocks_are_copied(world: World) -> None:
    world.a.gates.close("send_blocks")
    migration = world.migration(30)
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(outcome_of(migration))
        await world.a.gates.wait_reached("send_blocks")
        assert world.owners() == [("a", OLD)]
        world.a.requests[OLD].decode(2)
        world.a.gates.open("send_blocks")
    assert_moved(world, moving.result(), count=32, computed=PROMPT_TOKENS + 31)


async def test_number_of_stages_is_bounded_when_decoding_outruns_the_copy(world: World) -> None:
    world.a.decode_while = {"send_blocks": 40}
    migration = world.migration(30)
    migration.settings = replace(SETTINGS, max_stages=4)
    outcome = await migration.run()
    assert outcome.result is MigrationResult.MOVED
    assert outcome.stages == 4
    assert outcome.bytes == -(-world.b.activated[0][2] // 4) * BLOCK_BYTES


async def test_short_request_needs_no_stage_before_the_last(world: World) -> None:
    outcome = await world.migration(2).run()
    assert_moved(world, outcome, count=2, computed=PROMPT_TOKENS + 1)
    assert (outcome.stages, outcome.bytes) == (1, 3 * BLOCK_BYTES)


async def test_cached_prefix_is_not_sent(world: World) -> None:
    world.b.cached_tokens = 8 * 4
    outcome = await world.migration(40).run()
    assert_moved(world, outcome, count=40, computed=PROMPT_TOKENS + 39)
    assert outcome.bytes == (13 - 8) * BLOCK_BYTES


async def test_everything_cached_sends_nothing(world: World) -> None:
    world.b.cached_tokens = 48
    outcome = await world.migration(30).run()
    assert outcome.result is MigrationResult.MOVED
    assert (outcome.stages, outcome.bytes) == (0, 0)


async def test_stop_copy_freezes_before_it_copies(world: World) -> None:
    outcome = await world.migration(30, mode=MigrationMode.STOP_COPY).run()
    assert_moved(world, outcome, count=30, computed=PROMPT_TOKENS + 29)
    assert (outcome.stages, outcome.bytes) == (1, 10 * BLOCK_BYTES)
    assert world.a.gates.reached.index("freeze") < world.a.gates.reached.index("send_blocks")


async def test_recompute_sends_tokens_only(world: World) -> None:
    world.b.layout_here = replace(LAYOUT, dtype="fp8")
    outcome = await world.migration(30, mode=MigrationMode.RECOMPUTE).run()
    assert_moved(world, outcome, count=30, computed=0)
    assert (outcome.stages, outcome.bytes) == (0, 0)
    assert not world.a.channels


@pytest.mark.parametrize("mode", list(MigrationMode))
async def test_waiting_request_moves_without_a_copy(world: World, mode: MigrationMode) -> None:
    outcome = await world.migration(0, Phase.WAITING, mode).run()
    assert_moved(world, outcome, count=0, computed=0)
    assert not world.a.channels


async def test_request_in_prefill_is_waited_for(world: World) -> None:
    outcome = await world.migration(0, Phase.PREFILL).run()
    assert_moved(world, outcome, count=1, computed=PROMPT_TOKENS)


async def test_request_preempted_while_copied_is_computed_again(world: World) -> None:
    def preempt() -> None:
        world.a.requests[OLD].phase = Phase.WAITING

    world.a.gates.hooks["send_blocks"] = preempt
    outcome = await world.migration(30).run()
    assert_moved(world, outcome, count=30, computed=0)


async def test_request_that_outgrew_its_room_asks_for_more(world: World) -> None:
    world.a.decode_while = {"freeze": 50}
    migration = world.migration(2)
    outcome = await migration.run()
    assert_moved(world, outcome, count=52, computed=PROMPT_TOKENS + 51)
    assert migration.link.said == ["prepare", "reserve", "commit"]


async def test_unmovable_request_is_not_announced(world: World) -> None:
    world.a.unmovable = "n"
    migration = world.migration()
    outcome = await migration.run()
    await assert_stayed(world, migration, outcome, MigrationResult.UNMOVABLE, "n")
    assert migration.link.said == []
    assert world.owners() == [("a", OLD)]


async def test_refused_memory_at_prepare(world: World) -> None:
    world.b.capacity_tokens = 10
    migration = world.migration()
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "no_memory")
    assert world.owners() == [("a", OLD)]
    assert NEW in world.b.discarded


async def test_refused_memory_at_a_later_stage(world: World) -> None:
    migration = world.migration()

    def shrink() -> None:
        world.b.capacity_tokens = 10

    world.a.gates.hooks["announce_moving"] = shrink
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "no_memory")
    assert world.owners() == [("a", OLD)]
    assert migration.names == ["moving", "kept"]


async def test_refused_memory_while_frozen(world: World) -> None:
    world.b.capacity_tokens = 30
    world.a.decode_while = {"freeze": 50}
    migration = world.migration(2)
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "no_memory")
    assert world.owners() == [("a", OLD)]
    world.a.requests[OLD].decode()


@pytest.mark.parametrize("step", ["prepare", "reserve", "commit"])
async def test_error_in_the_destinations_engine_is_a_refusal(world: World, step: str) -> None:
    point = {"prepare": "admit", "reserve": "reserve", "commit": "activate"}[step]
    migration = world.migration()

    def break_it() -> None:
        world.b.fail[point] = RuntimeError("a bug")

    world.a.gates.hooks["look" if step == "prepare" else "announce_moving"] = break_it
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "internal")
    assert world.owners() == [("a", OLD)]


async def test_other_layout_is_refused(world: World) -> None:
    world.b.layout_here = replace(LAYOUT, dtype="fp8")
    migration = world.migration()
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "layout")


async def test_destination_that_will_not_admit(world: World) -> None:
    world.b.fail["admit"] = Refused(reason="draining")
    migration = world.migration()
    await assert_stayed(world, migration, await migration.run(), MigrationResult.REFUSED, "draining")


async def test_there_and_back_again(world: World) -> None:
    there = world.migration(30)
    assert (await there.run()).result is MigrationResult.MOVED
    await world.a.drop(OLD)
    world.b.requests[NEW].decode(5)
    back = Migration(world.b, ScriptedLink(world.at_a), NEW, to=InstanceId("a"), clock=world.clock)
    outcome = await back.run()
    assert (outcome.result, outcome.epoch) == (MigrationResult.MOVED, 2)
    assert world.owners() == [("a", Leg(REQUEST, 2))]
    assert world.a.replayed[Leg(REQUEST, 2)] == tokens(35)
    again = Migration(world.a, ScriptedLink(world.at_b), Leg(REQUEST, 2), clock=world.clock, pair=there.pair)
    await world.b.drop(NEW)
    outcome = await again.run()
    assert (outcome.result, outcome.epoch) == (MigrationResult.MOVED, 3)
    assert world.owners() == [("b", Leg(REQUEST, 3))]


async def test_failed_attempt_can_be_tried_again_at_once(world: World) -> None:
    migration = world.migration()
    migration.link.faults = {"commit": ["lost"]}
    assert (await migration.run()).result is MigrationResult.FAILED
    outcome = await migration.run()
    assert (outcome.result, outcome.epoch) == (MigrationResult.MOVED, 2)
    assert world.owners() == [("b", Leg(REQUEST, 2))]


async def test_transfers_of_two_requests_do_not_interleave(world: World) -> None:
    first, second = world.migration(), Migration(world.a, ScriptedLink(world.at_b), Leg(REQUEST, 0), clock=world.clock)
    second.leg = world.a.start(30, leg=Leg(type(REQUEST)("s"), 0))
    second.pair = first.pair
    world.a.gates.close("send_blocks")
    async with asyncio.TaskGroup() as group:
        outcomes = [group.create_task(outcome_of(migration)) for migration in (first, second)]
        await world.a.gates.wait_reached("send_blocks")
        await until(lambda: first.link.said + second.link.said == ["prepare", "reserve", "prepare"])
        world.a.gates.open("send_blocks")
    assert [outcome.result().result for outcome in outcomes] == [MigrationResult.MOVED] * 2


async def test_lock_held_by_others_does_not_freeze_the_request(world: World) -> None:
    migration = world.migration()
    migration.settings = replace(SETTINGS, pair_timeout_s=0.05)
    async with migration.pair.order:
        outcome = await migration.run()
    assert (outcome.result, outcome.reason) == (MigrationResult.FAILED, "timeout")
    assert "freeze" not in world.a.gates.reached
    assert world.owners() == [("a", OLD)]


async def test_frozen_time_is_measured(world: World) -> None:
    migration = world.migration()

    def wait() -> None:
        world.clock.now_s += 0.25

    world.b.gates.hooks["activate"] = wait
    outcome = await migration.run()
    assert outcome.frozen_ms == pytest.approx(250)
    assert outcome.total_ms == pytest.approx(250)
