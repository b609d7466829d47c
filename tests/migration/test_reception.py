"""The destination's side alone: messages as any peer may send them, in any order."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from migration.errors import ChannelError
from migration.leg import InstanceId, Leg
from migration.messages import (
    Answer,
    Cancel,
    Cancelled,
    ChannelOffer,
    Commit,
    Committed,
    LegState,
    Message,
    Prepare,
    Prepared,
    Query,
    Refusal,
    Reserve,
    Reserved,
    StateIs,
    TokenStep,
)
from migration.plan import MigrationMode
from migration.reception import Receptions
from migration.settings import ReceptionSettings
from tests.migration.scripted import BLOCK_TOKENS, HTTP, LAYOUT, PROMPT_TOKENS, REQUEST, Clock, ScriptedEngine, Wire, block_text, until

LEG = Leg(REQUEST, 1)
A = InstanceId("a")
PREPARE = Prepare(
    leg=LEG,
    source=A,
    mode=MigrationMode.LIVE,
    http=HTTP,
    created=None,
    steps=(TokenStep(1), TokenStep(2)),
    prompt_tokens=PROMPT_TOKENS,
    room_tokens=40,
    layout=LAYOUT,
    channel=ChannelOffer("memory", "1", ("here",)),
)
RESERVE = Reserve(LEG, 40, 1, 0, 2)
COMMIT = Commit(LEG, (TokenStep(3),), PROMPT_TOKENS + 2, 2, 2, 3, (b"s",))


class Peer:
    """What a source does, without its engine."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine = ScriptedEngine("b", Wire())
        self.receptions = Receptions(
            self.engine, self.engine, ReceptionSettings(max_migrations_in=2, reservation_timeout_s=15, remember_s=100), self.clock
        )

    async def say(self, *messages: Message) -> list[Answer]:
        return [await self.receptions.answer(message) for message in messages]

    def start(self, message: Message) -> "asyncio.Task[Answer]":
        return asyncio.get_running_loop().create_task(self.receptions.answer(message))

    def send(self, transfer: int, first_block: int, end_block: int) -> None:
        blocks = [block_text(block, COMMIT.computed_tokens) for block in range(first_block, end_block)]
        self.engine.wire.put(A, transfer, blocks)

    async def released(self) -> None:
        await until(lambda: self.receptions.arriving == 0)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    async with peer.receptions:
        yield peer


async def test_whole_way(peer: Peer) -> None:
    assert await peer.say(PREPARE, RESERVE) == [Prepared(LEG, 0), Reserved(LEG, 1)]
    assert peer.receptions.arriving == 1
    peer.send(1, 0, 2)
    peer.send(2, 2, 3)
    assert await peer.say(COMMIT, Query(LEG), Cancel(LEG)) == [Committed(LEG), StateIs(LEG, LegState.OWNER), Cancelled(LEG, owner=True)]
    assert peer.engine.activated == [(LEG, (1, 2, 3), 12, (b"s",))]
    assert peer.engine.replayed[LEG] == [1, 2, 3]
    assert peer.receptions.arriving == 0


async def test_repetition_gets_the_same_answer_and_does_nothing_twice(peer: Peer) -> None:
    peer.send(1, 0, 2)
    peer.send(2, 2, 3)
    for message in (PREPARE, RESERVE, COMMIT):
        assert (await peer.say(message, message))[0] == (await peer.say(message))[0]
    assert [peer.engine.gates.reached.count(point) for point in ("admit", "reserve", "receive_blocks", "activate")] == [1, 2, 2, 1]


async def test_concurrent_repetitions_join_the_one_in_progress(peer: Peer) -> None:
    peer.engine.gates.close("admit")
    asked = [peer.start(PREPARE) for _ in range(3)]
    await peer.engine.gates.wait_reached("admit")
    peer.engine.gates.open("admit")
    assert [await each for each in asked] == [Prepared(LEG, 0)] * 3
    assert peer.engine.gates.reached.count("admit") == 1


async def test_peer_that_hangs_up_does_not_stop_what_it_asked_for(peer: Peer) -> None:
    peer.engine.gates.close("admit")
    asked = peer.start(PREPARE)
    await peer.engine.gates.wait_reached("admit")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    peer.engine.gates.open("admit")
    assert await peer.say(PREPARE) == [Prepared(LEG, 0)]


async def test_query_during_commit_waits_for_its_outcome(peer: Peer) -> None:
    await peer.say(PREPARE)
    peer.engine.gates.close("activate")
    peer.send(2, 2, 3)
    commit = peer.start(replace(COMMIT, computed_tokens=0))
    await peer.engine.gates.wait_reached("activate")
    query, cancel = peer.start(Query(LEG)), peer.start(Cancel(LEG))
    await asyncio.sleep(0)
    assert not query.done()
    peer.engine.gates.open("activate")
    assert [await query, await cancel, await commit] == [StateIs(LEG, LegState.OWNER), Cancelled(LEG, owner=True), Committed(LEG)]


async def test_what_needs_no_blocks_is_made_ready_while_the_last_ones_come(peer: Peer) -> None:
    await peer.say(PREPARE)
    commit = peer.start(replace(COMMIT, computed_tokens=0))
    await peer.engine.gates.wait_reached("adopt")
    assert "activate" not in peer.engine.gates.reached
    peer.send(2, 2, 3)
    assert await commit == Committed(LEG)


async def test_unknown_is_a_promise(peer: Peer) -> None:
    assert await peer.say(Query(LEG), Query(LEG)) == [StateIs(LEG, LegState.UNKNOWN)] * 2
    prepared, committed = await peer.say(PREPARE, COMMIT)
    assert isinstance(prepared, Refusal)
    assert isinstance(committed, Refusal)
    assert not peer.engine.requests


async def test_cancel_before_prepare_voids_the_leg(peer: Peer) -> None:
    assert (await peer.say(Cancel(LEG)))[0] == Cancelled(LEG)
    assert isinstance((await peer.say(PREPARE))[0], Refusal)
    assert (await peer.say(replace(PREPARE, leg=LEG.next())))[0] == Prepared(LEG.next(), 0)


@pytest.mark.parametrize("message", [RESERVE, COMMIT])
async def test_message_about_a_leg_that_was_never_prepared(peer: Peer, message: Message) -> None:
    assert isinstance((await peer.say(message))[0], Refusal)
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.UNKNOWN)]


async def test_cancelled_reservation_waits_for_the_receive_that_writes_into_it(peer: Peer) -> None:
    await peer.say(PREPARE, RESERVE)
    assert await peer.say(Cancel(LEG), Query(LEG)) == [Cancelled(LEG), StateIs(LEG, LegState.DROPPED)]
    await peer.engine.gates.wait_reached("receive_blocks")
    assert not peer.engine.discarded
    assert peer.receptions.arriving == 1
    peer.engine.wire.put(A, 1, ChannelError())
    await peer.released()
    assert peer.engine.discarded == [LEG]
    assert not peer.engine.requests
    assert isinstance((await peer.say(COMMIT))[0], Refusal)


async def test_cancel_interrupts_admission(peer: Peer) -> None:
    peer.engine.gates.close("admit")
    asked = peer.start(PREPARE)
    await peer.engine.gates.wait_reached("admit")
    assert await peer.say(Query(LEG), Cancel(LEG)) == [StateIs(LEG, LegState.RESERVED), Cancelled(LEG)]
    assert isinstance(await asked, Refusal)
    await peer.released()
    assert not peer.engine.requests


async def test_silent_source_loses_its_reservation(peer: Peer) -> None:
    await peer.say(PREPARE)
    peer.clock.now_s += 14
    peer.receptions.expire()
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.RESERVED)]
    peer.clock.now_s += 15
    peer.receptions.expire()
    await peer.released()
    assert peer.engine.discarded == [LEG]
    assert isinstance((await peer.say(COMMIT))[0], Refusal)


async def test_a_reservation_whose_copy_failed_is_dropped_at_once(peer: Peer) -> None:
    """The source is dead, most likely: nobody waits for the reservation to expire. Should it live, it is told why."""
    peer.engine.fail["receive_blocks"] = ChannelError("the source is gone", reason="gone")
    await peer.say(PREPARE, RESERVE)
    peer.receptions.expire()
    await peer.released()
    assert peer.engine.discarded == [LEG]
    [refusal] = await peer.say(COMMIT)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "gone"


async def test_long_copy_is_not_silence(peer: Peer) -> None:
    await peer.say(PREPARE, RESERVE)
    peer.clock.now_s += 60
    peer.receptions.expire()
    assert peer.receptions.arriving == 1
    peer.send(1, 0, 2)
    peer.send(2, 2, 3)
    assert await peer.say(COMMIT) == [Committed(LEG)]


async def test_ended_legs_are_forgotten_in_time(peer: Peer) -> None:
    await peer.say(PREPARE, Cancel(LEG))
    await peer.released()
    peer.clock.now_s += 99
    peer.receptions.expire()
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.DROPPED)]
    peer.clock.now_s += 101
    peer.receptions.expire()
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.UNKNOWN)]


async def test_more_than_may_arrive_at_once(peer: Peer) -> None:
    legs = [Leg(type(REQUEST)(f"r{n}"), 1) for n in range(3)]
    answers = await peer.say(*(replace(PREPARE, leg=leg) for leg in legs))
    assert answers[:2] == [Prepared(leg, 0) for leg in legs[:2]]
    assert isinstance(answers[2], Refusal)
    assert answers[2].reason == "busy"
    await peer.say(Cancel(legs[0]))
    await until(lambda: peer.receptions.arriving == 1)
    assert (await peer.say(replace(PREPARE, leg=legs[2].next())))[0] == Prepared(legs[2].next(), 0)


async def test_older_attempt_makes_room_for_the_newer(peer: Peer) -> None:
    await peer.say(PREPARE)
    newer = replace(PREPARE, leg=LEG.next())
    assert await peer.say(newer) == [Prepared(LEG.next(), 0)]
    assert peer.engine.discarded == [LEG]
    assert list(peer.engine.requests) == [LEG.next()]
    stale = await peer.say(replace(PREPARE, leg=Leg(REQUEST, 0)))
    assert isinstance(stale[0], Refusal)
    assert stale[0].reason == "stale_epoch"


async def test_a_request_that_goes_on_here_by_another_way_leaves_no_room_for_earlier_legs(peer: Peer) -> None:
    assert await peer.say(PREPARE, RESERVE) == [Prepared(LEG, 0), Reserved(LEG, 1)]
    superseding = asyncio.get_running_loop().create_task(peer.receptions.supersede(Leg(REQUEST, 1000)))
    peer.send(1, 0, 2)
    await superseding
    assert peer.engine.discarded == [LEG]
    assert peer.receptions.arriving == 0
    (refused, late) = await peer.say(COMMIT, replace(PREPARE, leg=Leg(REQUEST, 2)))
    assert refused == Refusal(LEG, "dropped", "the leg is dropped here")
    assert isinstance(late, Refusal)
    assert late.reason == "stale_epoch"
    await peer.released()


async def test_shell_that_ends_drops_the_reservation(peer: Peer) -> None:
    await peer.say(PREPARE)
    peer.engine.requests[LEG].ended.set()
    await peer.released()
    assert isinstance((await peer.say(COMMIT))[0], Refusal)
    assert peer.engine.discarded == [LEG]


async def test_shell_that_ends_during_commit_is_never_owned(peer: Peer) -> None:
    await peer.say(PREPARE)
    peer.engine.gates.close("activate")
    peer.send(2, 2, 3)
    commit = peer.start(COMMIT)
    await peer.engine.gates.wait_reached("activate")
    peer.engine.requests[LEG].ended.set()
    assert isinstance(await commit, Refusal)
    await peer.released()
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.DROPPED)]
    assert not peer.engine.finished


async def test_failed_receive_refuses_the_commit(peer: Peer) -> None:
    await peer.say(PREPARE, RESERVE)
    peer.engine.wire.put(A, 1, ChannelError(reason="channel"))
    refusal = (await peer.say(replace(COMMIT, first_block=3)))[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "channel"
    assert (await peer.say(replace(COMMIT, first_block=3)))[0] == refusal
    await peer.released()


async def test_tokens_only_move_needs_the_same_model_and_no_more(peer: Peer) -> None:
    other = replace(LAYOUT, block_tokens=2 * BLOCK_TOKENS)
    bare = replace(PREPARE, mode=MigrationMode.RECOMPUTE, channel=None, room_tokens=0, layout=other)
    assert await peer.say(bare) == [Prepared(LEG, 0)]
    assert "reserve" not in peer.engine.gates.reached
    wrong = replace(bare, leg=Leg(type(REQUEST)("other"), 1), layout=replace(LAYOUT, model="x"))
    refusal = (await peer.say(wrong))[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "layout"


async def test_broken_discard_is_logged_and_the_rest_goes_on(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    peer.engine.fail["discard"] = RuntimeError("a bug")
    await peer.say(PREPARE, Cancel(LEG))
    await peer.released()
    assert "could not be discarded" in caplog.text
    assert not peer.engine.requests


async def test_closing_frees_what_is_held_and_refuses_what_comes() -> None:
    peer = Peer()
    async with peer.receptions:
        await peer.say(PREPARE)
    assert peer.engine.discarded == [LEG]
    assert peer.receptions.arriving == 0
    assert isinstance((await peer.say(replace(PREPARE, leg=LEG.next())))[0], Refusal)
    assert await peer.say(Query(LEG)) == [StateIs(LEG, LegState.DROPPED)]
    assert await peer.say(Query(Leg(REQUEST, 9))) == [StateIs(Leg(REQUEST, 9), LegState.UNKNOWN)]


async def test_expiry_runs_by_itself() -> None:
    peer = Peer()
    peer.receptions = Receptions(peer.engine, peer.engine, ReceptionSettings(reservation_timeout_s=0.04), peer.clock)
    async with peer.receptions:
        await peer.say(PREPARE)
        peer.clock.now_s += 1
        await peer.released()
