"""Deaths of whole vLLM backends while a request moves between them: API process, engine and workers, all at once."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import assert_same
from tests.e2e.fleet import Backend, Fleet
from tests.e2e.scene import moving, running

pytestmark = [pytest.mark.engine, pytest.mark.deaths, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PATH = "/v1/completions"
PROMPT = [1000 + 7 * position % 20000 for position in range(800)]


def body(salt: str) -> dict[str, Any]:
    """Every run computes its own prompt: a prefix hit changes the shapes of the first step, and with them the last bit."""
    return {"prompt": PROMPT, "max_tokens": 150, "temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True, "cache_salt": salt}


async def test_deaths_while_a_request_moves(vllm_fleet: Fleet) -> None:
    """One story, because each death costs half a minute of starting again."""
    fleet = vllm_fleet
    await fleet.mend()
    unmoved = await fleet.ask(PATH, body("unmoved"))
    async with moving(fleet, PATH, body("moved")) as scene:
        assert (await scene.outcome())["outcome"] == "moved"
    assert_same(scene.answer, unmoved)
    await fleet.settle()

    # The destination dies while the request is frozen: it goes on where it was.
    async with moving(fleet, PATH, body("frozen"), mode="stop_copy") as scene:
        await scene.frozen()
        await scene.destination.part.kill()
        outcome = await scene.outcome()
        assert (outcome["result"], outcome["status"]) == ("failed", 200), outcome
        assert outcome["outcome"] in ("channel", "peer_gone", "link")
    assert_same(scene.answer, unmoved)
    await fleet.settle()

    # It is started again, and takes requests of its old peers.
    await fleet.mend()
    async with moving(fleet, PATH, body("again")) as scene:
        assert (await scene.outcome())["outcome"] == "moved"
    assert_same(scene.answer, unmoved)
    await fleet.settle()

    # The source dies while it copies: the request is resumed at its destination.
    async with moving(fleet, PATH, body("copying")) as scene:
        await scene.copying()
        await scene.source.part.kill()
        outcome = await scene.outcome()
        assert (outcome["status"], outcome["error"]["code"]) in [(502, "instance_lost"), (502, "instance_unreachable")]
    assert_same(scene.answer, unmoved)
    await fleet.settle()

    # The engine's own process dies behind a server that lives a little longer.
    await fleet.mend()
    async with running(fleet, PATH, body("engine")) as scene:
        os.kill(engine_core(scene.source), signal.SIGKILL)
        await scene.source.part.ended()
    assert_same(scene.answer, unmoved)


def engine_core(backend: Backend) -> int:
    """The process of vLLM's engine core, in the backend's process group."""
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == backend.part.pid and b"EngineCore" in (directory / "cmdline").read_bytes():
                return pid
    raise AssertionError("no engine core is running")
