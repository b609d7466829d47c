"""An instance leaves under load: the long streams on it move away and are, byte for byte, what they would have been; and how long it takes
to leave does not depend on how long they still run. Every part is a process of its own."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.up import Model, UpOptions
from tests.e2e.answers import Answer, assert_same
from tests.e2e.fleet import REACHED_WITHIN_S, Backend, Fleet, open_fleet, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PATH = "/v1/chat/completions"
TOKENS = 1200
STREAMS = 6
BACKENDS = {
    "MIDSTREAM_FAKE_PREFIX_CACHE": "false",
    "MIDSTREAM_FAKE_CAPACITY_BLOCKS": "1024",
    "MIDSTREAM_FAKE_MAX_MODEL_TOKENS": "4096",
    "MIDSTREAM_FAKE_BLOCK_TOKENS": "16",
    "MIDSTREAM_FAKE_DECODE_BASE_S": "0.01",
}


def body_of(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "They crossed the river on a borrowed horse, and in the middle of it "}]
    return {"messages": messages, "stream": True, "temperature": 0.8, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    logs: Path = tmp_path_factory.mktemp("logs")
    options = UpOptions(engine="fake", instances=3)
    async with open_fleet(logs, options, Model("fake", "fake"), backend_environment=BACKENDS, gateway_environment={}) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(fleet: Fleet) -> Sequence[Answer]:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(fleet.ask(PATH, body_of(number))) for number in range(STREAMS)]
    return [task.result() for task in asked]


async def wait_streaming(fleet: Fleet) -> None:
    """Every stream has begun, and the first instance has some of them."""

    async def all_run() -> bool:
        rows = [row for backend in fleet.backends for row in await backend.requests()]
        return len(rows) == STREAMS and all(row["output_tokens"] >= 5 for row in rows) and bool(await fleet.backends[0].requests())

    await until(all_run, REACHED_WITHIN_S)


async def furthest(backends: Sequence[Backend]) -> int:
    """How many tokens the stream has that has most."""
    rows = [row for backend in backends for row in await backend.requests()]
    return max(int(row["output_tokens"]) for row in rows)


async def test_sigterm_moves_every_stream_away_and_ends_the_process_soon(fleet: Fleet, undisturbed: Sequence[Answer]) -> None:
    await fleet.mend()
    leaving, *others = fleet.backends
    answers = [Answer(fleet.next_request()) for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for number, answer in enumerate(answers):
            group.create_task(fleet.read(answer, PATH, body_of(number)))
        await wait_streaming(fleet)
        assert leaving.part.child is not None
        leaving.part.child.stopping = True
        leaving.part.child.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(REACHED_WITHIN_S):
            assert await leaving.part.child.process.wait() == 0
        assert await furthest(others) < TOKENS * 0.75
    for answer, unmoved in zip(answers, undisturbed, strict=True):
        assert_same(answer, unmoved)
    await fleet.settle()
