import asyncio
from collections.abc import Callable, Coroutine

import pytest

from backend.engine.fake.engine import FakeEngine
from backend.engine.fake.sampling import Sampling
from backend.engine.request import EngineRequest, RequestState
from migration.channel.base import ABORTED
from migration.errors import ChannelError, ChannelUnknown, Refused, RequestEnded, Unmovable
from migration.leg import InstanceId, Leg, RequestId
from migration.ports import Phase
from tests.backend.engine.fake.world import PROMPT, Hooks, Served, World, move, open_world, until

GREEDY = Sampling(120, ignore_eos=True, logprobs=3)
SEEDED = Sampling(120, temperature=0.8, seed=7, ignore_eos=True)
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


async def begin(world: World, sampling: Sampling, *, tokens: int = 40) -> tuple[FakeEngine, FakeEngine, Served]:
    """Two engines, and a request that has got so far on the first."""
    source, there = await world.engine(), await world.engine()
    here = await world.serve(source, sampling)
    await until(lambda: len(here.tokens) >= tokens)
    return source, there, here


@BOTH
async def test_the_same_request_gives_the_same_tokens_anywhere(sampling: Sampling) -> None:
    async with open_world() as world:
        first, second = await world.unmoved(sampling), await world.unmoved(sampling)
        assert first.tokens == second.tokens
        assert len(first.tokens) == 120
        assert len(set(first.tokens)) > 40
        assert first.finish_reason == "length"
        assert first.flight.prompt_tokens == len(PROMPT)
        world.assert_nothing_held()


async def test_batching_chunks_and_preemption_do_not_show_in_the_tokens() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(GREEDY)).tokens
        tight = await world.engine(capacity_blocks=20, max_model_tokens=300, max_prefill_tokens=7, prefix_cache=False)
        served = [await world.serve(tight, GREEDY, name=f"r{i}") for i in range(5)]
        for one in served:
            assert (await one.done()).tokens == expected
        assert tight.load().preemptions > 0
        world.assert_nothing_held()


@BOTH
@pytest.mark.parametrize("stages", [0, 1, 2], ids=["recompute", "stop_copy", "live"])
async def test_a_moved_request_gives_the_tokens_of_an_unmoved_one(sampling: Sampling, stages: int) -> None:
    async with open_world() as world:
        expected = await world.unmoved(sampling)
        _, there, here = await begin(world, sampling)
        moved = await (await move(world, here, there, stages=stages)).done()
        assert here.tokens == expected.tokens[: len(here.tokens)]
        assert moved.tokens == expected.tokens
        assert moved.flight.history == expected.flight.history
        assert moved.finish_reason == "length"
        world.assert_nothing_held()


async def test_there_and_back_again_finds_its_prefix_in_the_cache() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(SEEDED)).tokens
        source, there, here = await begin(world, SEEDED)
        away = await move(world, here, there)
        await until(lambda: len(away.tokens) > 60)
        back = await move(world, away, source)
        assert back.generation().request.cached_tokens > len(PROMPT)
        assert (await back.done()).tokens == expected
        world.assert_nothing_held()


async def test_a_waiting_request_moves_without_a_copy() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(GREEDY)).tokens
        source, there = await world.engine(max_batch=1), await world.engine()
        first = await world.serve(source, GREEDY, name="first")
        await until(lambda: bool(first.tokens))
        here = await world.serve(source, GREEDY)
        await until(lambda: source.load().waiting == 1)
        assert (await source.look(here.leg)).phase is Phase.WAITING
        moved = await (await move(world, here, there, stages=0)).done()
        assert moved.tokens == expected
        assert (await first.done()).tokens == expected
        world.assert_nothing_held()


# -- negative controls: what goes wrong must show


def corrupt(engine: FakeEngine, request: EngineRequest) -> None:
    block = request.blocks[1]
    engine.memory.write(block, bytes([engine.memory.read(block)[5] ^ 1]), 5)


def lose_a_block(engine: FakeEngine, request: EngineRequest) -> None:
    engine.memory.write(request.blocks[2], bytes(engine.memory.block_bytes))


def repeat_a_block(engine: FakeEngine, request: EngineRequest) -> None:
    engine.memory.write(request.blocks[2], engine.memory.read(request.blocks[1]))


@pytest.mark.parametrize("damage", [corrupt, lose_a_block, repeat_a_block])
async def test_damaged_kv_shows_in_the_tokens(damage: Callable[[FakeEngine, EngineRequest], None]) -> None:
    async with open_world() as world:
        expected = (await world.unmoved(GREEDY)).tokens
        _, there, here = await begin(world, GREEDY)
        moved = await (await move(world, here, there, hooks=Hooks(before_activate=damage))).done()
        assert len(moved.tokens) == len(expected)
        assert moved.tokens != expected


async def test_forgotten_random_state_shows_in_the_tokens() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(SEEDED)).tokens
        _, there, here = await begin(world, SEEDED)
        moved = await (await move(world, here, there, hooks=Hooks(forget_sampler=True))).done()
        assert moved.tokens != expected


async def test_a_random_state_that_nobody_carries_is_that_of_its_seed() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(SEEDED)).tokens
        _, there, here = await begin(world, SEEDED)
        moved = await (await move(world, here, there, hooks=Hooks(carry_no_sampler=True))).done()
        assert moved.tokens == expected


# -- staying


async def test_a_thawed_request_goes_on_as_if_nothing_had_been() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(SEEDED)).tokens
        source, _, here = await begin(world, SEEDED)
        frozen = await source.freeze(here.leg)
        assert frozen.computed_tokens == len(PROMPT) + len(frozen.steps) - 1
        assert source.runner.model.begin_step(0.0) is None
        assert (await source.freeze(here.leg)) == frozen
        await source.thaw(here.leg)
        assert (await here.done()).tokens == expected
        await source.thaw(here.leg)
        world.assert_nothing_held()


async def test_preemption_in_mid_copy_leaves_the_blocks_being_copied_alone() -> None:
    async with open_world() as world:
        expected = (await world.unmoved(GREEDY)).tokens
        source, there, here = await begin(world, GREEDY)

        async def preempt() -> None:
            def victimise() -> None:
                model, request = source.runner.model, here.generation().request
                model.running.remove(request)
                model._preempt(request, 0.0)

            await source.runner.at_boundary(victimise)
            assert (await source.look(here.leg)).phase is Phase.WAITING

        moved = await move(world, here, there, hooks=Hooks(before_freeze=preempt))
        assert (await moved.done()).tokens == expected
        world.assert_nothing_held()


async def test_a_client_that_leaves_frees_everything_in_every_state() -> None:
    async with open_world() as world:
        source, there, here = await begin(world, GREEDY)
        frozen = await source.freeze(here.leg)
        shell = await world.serve(there, GREEDY, epoch=1, known=frozen.steps)
        await there.reserve(shell.leg, frozen.steps, 200)
        assert there.load().free_tokens < there.load().capacity_tokens
        waiting = asyncio.gather(source.wait_ended(here.leg), there.wait_ended(shell.leg))
        await here.leave()
        await shell.leave()
        await waiting
        world.assert_nothing_held()
        assert here.flight.ended.is_set()
        for port in (source.look, source.freeze, source.wait_first_token):
            with pytest.raises(RequestEnded):
                await port(here.leg)
        with pytest.raises(RequestEnded):
            await there.adopt(shell.leg, frozen.steps, frozen.computed_tokens, frozen.sampler)
        with pytest.raises(RequestEnded):
            await there.activate(shell.leg, frozen.steps, frozen.computed_tokens)


async def test_a_request_that_finishes_ends_whoever_waits_for_it() -> None:
    async with open_world() as world:
        source, _, here = await begin(world, GREEDY)
        await source.wait_ended(here.leg)
        with pytest.raises(RequestEnded):
            await source.freeze(here.leg)


async def test_a_discarded_shell_is_forgotten_once_its_receive_has_ended() -> None:
    async with open_world() as world:
        source, there, here = await begin(world, GREEDY)
        await there.accept_channel(InstanceId("a"), await source.offer_channel(InstanceId("b"), fresh=False))
        known = source.steps(here.leg)
        shell = await world.serve(there, GREEDY, epoch=1, known=known)
        await there.reserve(shell.leg, known, 200)
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(there.receive_blocks(shell.leg, InstanceId("a"), 1, 0, 2))
            await asyncio.sleep(0)
            discarding = group.create_task(there.discard(shell.leg))
            await until(lambda: shell.generation_ended())
            assert not discarding.done()
            assert there.load().free_tokens == there.load().capacity_tokens - 2 * 16
            await source.send_blocks(here.leg, InstanceId("b"), 1, 0, 2)
        assert receiving.done()
        assert there.load().free_tokens == there.load().capacity_tokens
        await there.discard(shell.leg)
        await shell.leave()


# -- refusing


async def test_what_cannot_move_says_why() -> None:
    async with open_world() as world:
        source, there, here = await begin(world, GREEDY)
        here.flight.unmovable = "n"
        with pytest.raises(Unmovable) as caught:
            source.check_movable(here.leg)
        assert caught.value.reason == "n"
        shell = await world.serve(there, GREEDY, epoch=1, known=())
        with pytest.raises(Unmovable, match="arriving"):
            await there.freeze(shell.leg)
        with pytest.raises(Unmovable, match="arriving"):
            there.check_movable(shell.leg)
        with pytest.raises(RequestEnded):
            source.check_movable(Leg(RequestId("nobody"), 0))
        assert (await source.look(here.leg)).phase is Phase.DECODE


async def test_a_shell_is_refused_memory_that_is_not_there() -> None:
    async with open_world() as world:
        there = await world.engine(capacity_blocks=64, max_model_tokens=1000)
        shell = await world.serve(there, GREEDY, epoch=1, known=())
        with pytest.raises(Refused) as caught:
            await there.reserve(shell.leg, (), 1040)
        assert caught.value.reason == "too_long"
        other = await world.serve(there, GREEDY, name="other", epoch=1, known=())
        await there.reserve(other.leg, (), 800)
        with pytest.raises(Refused) as caught:
            await there.reserve(shell.leg, (), 320)
        assert caught.value.reason == "no_memory"
        await there.discard(other.leg)
        assert await there.reserve(shell.leg, (), 320) == 0
        with pytest.raises(Refused, match="computed"):
            await there.activate(shell.leg, (), 20)
        assert shell.generation().request.state is RequestState.SHELL


async def test_blocks_that_are_gone_are_told_to_the_receiver() -> None:
    async with open_world() as world:
        source, there, here = await begin(world, GREEDY)
        await there.accept_channel(InstanceId("a"), await source.offer_channel(InstanceId("b"), fresh=False))
        shell = await world.serve(there, GREEDY, epoch=1, known=())
        await there.reserve(shell.leg, (), 200)
        await here.leave()
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(failure_of(there.receive_blocks(shell.leg, InstanceId("a"), 1, 0, 2)))
            with pytest.raises(ChannelError, match="does not hold"):
                await source.send_blocks(here.leg, InstanceId("b"), 1, 0, 2)
        assert "sends nothing" in str(receiving.result())


@pytest.mark.parametrize("gone", [False, True], ids=["running", "gone"])
async def test_an_empty_range_calls_a_transfer_off_and_the_channel_goes_on(gone: bool) -> None:
    async with open_world() as world:
        source, there, here = await begin(world, GREEDY)
        other = await world.serve(source, GREEDY, name="other")
        await until(lambda: len(other.tokens) >= 40)
        offer = await source.offer_channel(InstanceId("b"), fresh=False)
        await there.accept_channel(InstanceId("a"), offer)
        shell = await world.serve(there, GREEDY, epoch=1, known=())
        await there.reserve(shell.leg, (), 200)
        if gone:
            await here.leave()
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(failure_of(there.receive_blocks(shell.leg, InstanceId("a"), 1, 0, 2)))
            assert await source.send_blocks(here.leg, InstanceId("b"), 1, 0, 0) == 0
        failure = receiving.result()
        assert isinstance(failure, ChannelError)
        assert failure.reason == ABORTED
        assert await source.offer_channel(InstanceId("b"), fresh=False) == offer
        async with asyncio.TaskGroup() as group:
            group.create_task(there.receive_blocks(shell.leg, InstanceId("a"), 2, 0, 2))
            assert await source.send_blocks(other.leg, InstanceId("b"), 2, 0, 2) == 2 * source.memory.block_bytes


async def failure_of(receiving: Coroutine[None, None, None]) -> Exception | None:
    try:
        await receiving
    except ChannelError as error:
        return error
    return None


async def test_without_a_channel_nothing_is_received() -> None:
    async with open_world() as world:
        there = await world.engine()
        shell = await world.serve(there, GREEDY, epoch=1, known=())
        await there.reserve(shell.leg, (), 200)
        with pytest.raises(ChannelUnknown):
            await there.receive_blocks(shell.leg, InstanceId("a"), 1, 0, 2)


async def test_the_load_is_told_of_urgently_when_requests_come_and_go() -> None:
    async with open_world() as world:
        engine = await world.engine()
        told: list[bool] = []
        engine.watch_load(told.append)
        await (await world.serve(engine, GREEDY)).done()
        assert told[0]
        assert told.count(True) >= 3
        assert told.count(False) > 50
        load = engine.load()
        assert (load.engine, load.models, load.running, load.waiting) == ("fake", ("fake",), 0, 0)
        assert load.free_tokens == load.capacity_tokens == 256 * 16
