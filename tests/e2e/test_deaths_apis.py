"""Anthropic's messages and responses move, and outlive their instance, every part a process of its own."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.up import Model, UpOptions
from tests.e2e.answers import Answer, assert_same
from tests.e2e.fleet import Fleet, open_fleet
from tests.e2e.scene import moving, repeated_if_missed, running
from tests.e2e.test_deaths import BACKENDS, GATEWAY, PROMPT

pytestmark = [pytest.mark.deaths, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SAMPLING = {"temperature": 0.8, "seed": 21, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {**SAMPLING, "messages": [{"role": "user", "content": PROMPT * 18}], "max_tokens": 320},
    "/v1/responses": {**SAMPLING, "input": PROMPT * 18, "max_output_tokens": 320},
}


@dataclass(eq=False)
class Stage:
    """The fleet, a request, and what it is answered when nobody disturbs it."""

    fleet: Fleet
    path: str
    body: dict[str, Any]
    unmoved: Answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    logs: Path = tmp_path_factory.mktemp("logs")
    options = UpOptions(engine="fake", instances=2)
    async with open_fleet(logs, options, Model("fake", "fake"), backend_environment=BACKENDS, gateway_environment=GATEWAY) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", params=BODIES)
async def stage(fleet: Fleet, request: pytest.FixtureRequest) -> Stage:
    await fleet.mend()
    path = request.param
    body = {**BODIES[path], "stream": True}
    return Stage(fleet, path, body, await fleet.ask(path, body))


@repeated_if_missed
async def test_it_moves(stage: Stage) -> None:
    async with moving(stage.fleet, stage.path, stage.body) as scene:
        assert (await scene.outcome())["outcome"] == "moved"
    assert_same(scene.answer, stage.unmoved)
    await stage.fleet.settle()


@repeated_if_missed
async def test_the_source_dies_while_it_copies(stage: Stage) -> None:
    async with moving(stage.fleet, stage.path, stage.body) as scene:
        await scene.copying()
        await scene.source.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.fleet.settle()


@repeated_if_missed
async def test_the_owner_dies(stage: Stage) -> None:
    async with running(stage.fleet, stage.path, stage.body) as scene:
        await scene.source.part.kill()
    assert_same(scene.answer, stage.unmoved)
    await stage.fleet.settle()


@repeated_if_missed
async def test_the_owner_hangs(stage: Stage) -> None:
    async with running(stage.fleet, stage.path, stage.body) as scene:
        with scene.source.part.hanging():
            await scene.reading
    assert_same(scene.answer, stage.unmoved)
    await stage.fleet.settle()
