"""A real vLLM instance is drained and stopped while it serves long streams: both streams are what they would have been."""

import asyncio
import signal
from typing import Any

import pytest

from tests.e2e.answers import Answer, assert_same
from tests.e2e.fleet import REACHED_WITHIN_S, Fleet, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PATH = "/v1/completions"
TOKENS = 250
DRAINED_WITHIN_S = 120.0


def body(number: int, salt: str) -> dict[str, Any]:
    """Every run computes its own prompt: a prefix hit changes the shapes of the first step, and with them the last bit."""
    prompt = [1000 + (7 + number) * position % 20000 for position in range(120)]
    return {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0.9,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }


async def test_the_streams_of_a_drained_instance_go_on_elsewhere(vllm_fleet: Fleet) -> None:
    fleet = vllm_fleet
    await fleet.mend()
    unmoved = [await fleet.ask(PATH, body(number, f"unmoved-{number}")) for number in range(2)]
    answers = [Answer(fleet.next_request()) for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        for number, answer in enumerate(answers):  # the gateway sends one to each
            group.create_task(fleet.read(answer, PATH, body(number, f"drained-{number}")))
        leaving = await fleet.locate(answers[0].request, 10)
        response = await fleet.client.post(f"{fleet.gateway_url}/admin/instances/{leaving.id}/drain")
        assert (response.status_code, response.json()["state"]) == (200, "draining")

        async def is_drained() -> bool:
            told = (await fleet.client.get(f"{leaving.url}/midstream/drain")).json()
            return told["remaining"] == 0 and any(row["result"] == "moved" for row in told["requests"])

        await until(is_drained, DRAINED_WITHIN_S)
        assert leaving.part.child is not None
        leaving.part.child.stopping = True
        leaving.part.child.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(REACHED_WITHIN_S):
            assert await leaving.part.child.process.wait() == 0
        rows = await fleet.other(leaving).requests()
        assert answers[0].request in {row["request"] for row in rows}
    for answer, whole in zip(answers, unmoved, strict=True):
        assert_same(answer, whole)
    await fleet.settle()
