"""Whatever part of the product dies, hangs or leaves while a request moves: the client's answer is as if nothing had been, or ends
honestly, and afterwards nothing is held anywhere. Every part is a process of its own, every death a real one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.up import Model, UpOptions
from tests.e2e.answers import Answer, assert_honest, assert_same
from tests.e2e.fleet import SETTLED_WITHIN_S, Backend, Fleet, open_fleet, until
from tests.e2e.scene import Scene, moving, repeated_if_missed, running

pytestmark = [pytest.mark.deaths, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PATH = "/v1/chat/completions"
FREE_WITHIN_S = 1.0
"""What the design promises for an engine whose client has left."""

# 20 blocks of prompt take two thirds of a second to copy: time to hit. All tokens take two seconds.
PROMPT_BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 20, 16, 2048
BACKENDS = {
    "MIDSTREAM_FAKE_PREFIX_CACHE": "false",
    "MIDSTREAM_FAKE_CAPACITY_BLOCKS": "256",
    "MIDSTREAM_FAKE_MAX_MODEL_TOKENS": "2048",
    "MIDSTREAM_FAKE_BLOCK_TOKENS": str(BLOCK_TOKENS),
    "MIDSTREAM_FAKE_KV_BYTES_PER_BLOCK": str(BLOCK_BYTES),
    "MIDSTREAM_FAKE_DECODE_BASE_S": "0.006",
    "MIDSTREAM_FAKE_PREFILL_BASE_S": "0.006",
    "MIDSTREAM_FAKE_PREFILL_PER_TOKEN_S": "1e-5",
    "MIDSTREAM_FAKE_COPY_BYTES_PER_S": "60000",
    # Deadlines long enough for a busy machine, and short enough to be waited for.
    "MIDSTREAM_COPY_FLOOR_BYTES_PER_S": "40000",
    "MIDSTREAM_COPY_SLACK_S": "1.5",
    "MIDSTREAM_MESSAGE_TIMEOUT_S": "1.5",
    "MIDSTREAM_RESOLVE_TIMEOUT_S": "1",
    # Longer than any test: nothing here may have to wait for a reservation to expire.
    "MIDSTREAM_RESERVATION_TIMEOUT_S": "60",
    "MIDSTREAM_DRAIN_DEADLINE_S": "1",
}
GATEWAY = {
    "MIDSTREAM_REBALANCE": "false",
    "MIDSTREAM_CLAIM_TTL_S": "2",
    "MIDSTREAM_IDLE_TIMEOUT_S": "60",
    "MIDSTREAM_HANG_TIMEOUT_S": "1",
    "MIDSTREAM_RESUME_WAIT_S": "30",
    "MIDSTREAM_STORE_TIMEOUT_S": "0.5",
    "MIDSTREAM_STORE_RETRY_S": "0.2",
    "MIDSTREAM_SWITCH_WAIT_S": "0.5",
    "MIDSTREAM_SHUTDOWN_GRACE_S": "1",
}
PROMPT = "They crossed the river on a borrowed horse, and in the middle of it "


@dataclass(eq=False)
class Stage:
    """The fleet, the request that all tests make, and what it is answered when nobody disturbs it."""

    fleet: Fleet
    body: dict[str, Any]
    unmoved: Answer

    def moving(self, mode: str = "live") -> Any:
        return moving(self.fleet, PATH, self.body, mode)

    def running(self) -> Any:
        return running(self.fleet, PATH, self.body)

    async def assert_nothing_left(self) -> None:
        await self.fleet.settle()
        if self.fleet.gateway.alive:
            assert await self.fleet.live_at_gateway() == 0


def body_of(stream: bool) -> dict[str, Any]:
    text = (PROMPT * 20)[: PROMPT_BLOCKS * BLOCK_TOKENS * 4 - 40]
    sampling = {"temperature": 0.8, "seed": 21, "max_tokens": 320, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return {"messages": [{"role": "user", "content": text}], "stream": stream, **sampling, **options}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Fleet, dict[bool, Answer]]]:
    logs: Path = tmp_path_factory.mktemp("logs")
    options = UpOptions(engine="fake", instances=2)
    async with (
        open_fleet(logs, options, Model("fake", "fake"), backend_environment=BACKENDS, gateway_environment=GATEWAY) as fleet,
        asyncio.TaskGroup() as group,
    ):
        unmoved = {stream: group.create_task(fleet.ask(PATH, body_of(stream))) for stream in (True, False)}
        await asyncio.wait(unmoved.values())
        yield fleet, {stream: task.result() for stream, task in unmoved.items()}


@pytest_asyncio.fixture(loop_scope="module", params=[True, False], ids=["stream", "plain"])
async def stage(started: tuple[Fleet, dict[bool, Answer]], request: pytest.FixtureRequest) -> Stage:
    """With everything alive and idle."""
    fleet, unmoved = started
    await fleet.mend()
    return Stage(fleet, body_of(request.param), unmoved[request.param])


only_streams = pytest.mark.parametrize("stage", [True], ids=["stream"], indirect=True)


async def assert_free_soon(*backends: Backend) -> None:
    """Their engines hold nothing any more, within what is promised."""

    async def are_idle() -> bool:
        return all([await backend.is_idle() for backend in backends])

    await until(are_idle, FREE_WITHIN_S)


def assert_failed(outcome: dict[str, Any], *reasons: str) -> None:
    assert (outcome["status"], outcome["result"]) == (200, "failed"), outcome
    assert outcome["outcome"] in reasons


# ---- the source


@pytest.mark.parametrize("mode", ["live", "stop_copy"])
@repeated_if_missed
async def test_the_source_dies_while_it_copies(stage: Stage, mode: str) -> None:
    """Running or frozen, it takes the request with it. The destination drops what was copied, and the request is resumed there."""
    async with stage.moving(mode) as scene:
        await (scene.copying() if mode == "live" else scene.frozen())
        await scene.source.part.kill()
        outcome = await scene.outcome()
    assert outcome["status"] == 502
    assert outcome["error"]["code"] in ("instance_lost", "instance_unreachable")
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_the_source_dies_before_the_gateway_has_switched(stage: Stage) -> None:
    """The gateway hears nothing of the hand-over until the source is dead; the destination has all tokens."""
    async with stage.moving("stop_copy") as scene:
        await scene.frozen()
        with stage.fleet.gateway.hanging():
            await scene.committed()
            await scene.source.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@only_streams
@repeated_if_missed
async def test_the_source_dies_after_the_move(stage: Stage) -> None:
    async with stage.moving() as scene:
        assert (await scene.outcome())["outcome"] == "moved"
        await scene.source.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_the_owner_dies(stage: Stage) -> None:
    async with stage.running() as scene:
        await scene.source.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_one_owner_dies_after_the_other(stage: Stage) -> None:
    """Nobody is left, until the first is started anew: the answer waits for it."""
    async with stage.running() as scene:
        await scene.source.part.kill()
        await until(scene.is_resumed, SETTLED_WITHIN_S)
        await scene.destination.part.kill()
        await scene.source.part.start()
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_nobody_is_left(stage: Stage) -> None:
    """The end is honest, after some time."""
    async with stage.running() as scene:
        await scene.source.part.kill()
        await scene.destination.part.kill()
    # A plain answer begins anew at the second one, which is gone before or after it was asked.
    codes = ("instance_lost",) if stage.body["stream"] else ("instance_lost", "instance_unreachable")
    assert_honest(scene.answer, stage.unmoved, codes)


@repeated_if_missed
async def test_the_owner_hangs(stage: Stage) -> None:
    """Its connection stays open; its silence and its missing reports give it away. Once it is back, it holds nothing."""
    async with stage.running() as scene:
        with scene.source.part.hanging():
            await scene.reading
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


# ---- the destination


@pytest.mark.parametrize("mode", ["live", "stop_copy"])
@repeated_if_missed
async def test_the_destination_dies_while_blocks_are_copied(stage: Stage, mode: str) -> None:
    """Running or frozen, the request goes on where it is."""
    async with stage.moving(mode) as scene:
        await (scene.copying() if mode == "live" else scene.frozen())
        await scene.destination.part.kill()
        assert_failed(await scene.outcome(), "channel", "peer_gone", "link")
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_the_new_owner_dies(stage: Stage) -> None:
    async with stage.moving() as scene:
        assert (await scene.outcome())["outcome"] == "moved"
        await scene.destination.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@only_streams
@repeated_if_missed
async def test_the_destination_hangs_while_blocks_are_copied(stage: Stage) -> None:
    """The request outlasts the source's patience, and goes on where it is."""
    stage.body["max_tokens"] = 600
    unmoved = await stage.fleet.ask(PATH, stage.body)
    async with stage.moving() as scene:
        await scene.copying()
        with scene.destination.part.hanging():
            assert_failed(await scene.outcome(), "link", "channel", "channel_timeout", "timeout")
            await scene.reading
    assert_same(scene.answer, unmoved)
    await stage.assert_nothing_left()


@repeated_if_missed
async def test_the_destination_hangs_at_the_hand_over_and_comes_back(stage: Stage) -> None:
    """COMMIT was sent and never answered: the source gives up rather than guess, and the destination, once back, goes on."""
    async with stage.moving("stop_copy") as scene:
        await scene.frozen()
        with scene.destination.part.hanging():
            outcome = await scene.outcome()
            assert (outcome["status"], outcome["result"], outcome["outcome"]) == (200, "lost", "unresolved")
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


@only_streams
@repeated_if_missed
async def test_the_destination_hangs_at_the_hand_over_for_too_long(stage: Stage) -> None:
    async with stage.moving("stop_copy") as scene:
        await scene.frozen()
        with scene.destination.part.hanging():
            assert (await scene.outcome())["result"] == "lost"
            await scene.reading
        await assert_free_soon(scene.source, scene.destination)
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()


# ---- the gateway, the store, the client


def at_moments(plain: tuple[str, ...]) -> pytest.MarkDecorator:
    """All moments of a stream, and these of an answer that is no stream."""
    both = [(True, moment) for moment in ("running", "copying", "frozen", "moved")] + [(False, moment) for moment in plain]
    ids = [f"{'stream' if stream else 'plain'}-{moment}" for stream, moment in both]
    return pytest.mark.parametrize(("stage", "moment"), both, indirect=["stage"], ids=ids)


@asynccontextmanager
async def reached(stage: Stage, moment: str) -> AsyncIterator[Scene]:
    async with stage.running() if moment == "running" else stage.moving("stop_copy" if moment == "frozen" else "live") as scene:
        match moment:
            case "copying":
                await scene.copying()
            case "frozen":
                await scene.frozen()
            case "moved":
                outcome = await scene.outcome()
                assert outcome.get("outcome") == "moved", outcome
        yield scene


@at_moments(plain=("copying",))
@repeated_if_missed
async def test_the_gateway_dies(stage: Stage, moment: str) -> None:
    """Nobody is left to read: all engines are free within a second, and its claims run out."""
    async with reached(stage, moment) as scene:
        await stage.fleet.gateway.kill()
        await assert_free_soon(scene.source, scene.destination)
    assert not scene.answer.whole
    assert scene.answer.failure
    await stage.assert_nothing_left()


@at_moments(plain=("copying", "frozen", "moved"))
@repeated_if_missed
async def test_the_client_leaves(stage: Stage, moment: str) -> None:
    async with reached(stage, moment) as scene:
        scene.reading.cancel()
        await assert_free_soon(scene.source, scene.destination)
    if moment in ("copying", "frozen"):
        outcome = await scene.outcome()
        assert (outcome["status"], outcome["result"], outcome["outcome"]) == (200, "ended", "request_ended")
    await stage.assert_nothing_left()


@at_moments(plain=("copying",))
@repeated_if_missed
async def test_redis_dies(stage: Stage, moment: str) -> None:
    """Streams and moves need no store; when it is back, nothing of them is found in it."""
    async with reached(stage, moment) as scene:
        await stage.fleet.redis.kill()
        ordered = stage.fleet.move(scene.answer.request, scene.destination.id) if moment == "running" else scene.outcome()
        outcome = await ordered
        assert outcome["outcome"] == "moved", outcome
    assert_same(scene.answer, stage.unmoved)
    await stage.assert_nothing_left()
    await stage.fleet.mend()
    await stage.assert_nothing_left()
