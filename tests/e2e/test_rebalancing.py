"""Every part a process of its own: a long prompt that fits on no instance starts sooner, because requests make room for it by moving."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.up import Model, UpOptions
from tests.e2e.answers import Answer
from tests.e2e.fleet import Fleet, open_fleet, until

pytestmark = pytest.mark.timeout(120)

PATH = "/v1/completions"
SHORT, LONG, TOKENS = 600, 1000, 120
"""Two short prompts on each of two instances of 2,048 tokens leave 848 free on each: too few for the long one, enough together."""
BACKENDS = {
    "MIDSTREAM_FAKE_PREFIX_CACHE": "false",
    "MIDSTREAM_FAKE_CAPACITY_BLOCKS": "128",
    "MIDSTREAM_FAKE_MAX_MODEL_TOKENS": "2048",
    "MIDSTREAM_FAKE_EOS_ONE_IN": "0",
    "MIDSTREAM_FAKE_DECODE_BASE_S": "0.04",
    "MIDSTREAM_FAKE_PREFILL_BASE_S": "0.005",
    "MIDSTREAM_FAKE_PREFILL_PER_TOKEN_S": "1e-5",
}


@dataclass(frozen=True, slots=True)
class Played:
    """What the long prompt waited, how many short answers had ended by then, and how many requests had moved."""

    waited_s: float
    ended: int
    moved: float


async def play(logs: Path, rebalance: str) -> Played:
    environment = {"MIDSTREAM_REBALANCE": rebalance, "MIDSTREAM_LOG_DECISIONS": "none"}
    options = UpOptions(engine="fake", instances=2)
    async with (
        open_fleet(logs, options, Model("fake", "fake"), backend_environment=BACKENDS, gateway_environment=environment) as fleet,
        asyncio.TaskGroup() as asking,
    ):
        shorts = []
        for _ in range(4):
            shorts.append(Answer(fleet.next_request()))
            asking.create_task(fleet.read(shorts[-1], PATH, body(SHORT, TOKENS)))
            await fleet.locate(shorts[-1].request, 1)
        long, asked_s = Answer(fleet.next_request()), time.monotonic()
        reading = asking.create_task(fleet.read(long, PATH, body(LONG, 8)))
        await fleet.locate(long.request, 1)
        waited_s, ended = time.monotonic() - asked_s, sum(short.whole for short in shorts)
        await reading

        async def are_whole() -> bool:
            return all(short.whole for short in shorts)

        await until(are_whole, 30)
        for answer in (*shorts, long):
            assert (answer.status, answer.failure) == (200, "")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in answer.body
        return Played(waited_s, ended, await moves(fleet))


def body(prompt_tokens: int, max_tokens: int) -> dict[str, object]:
    return {"prompt": [7] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 3}


async def moves(fleet: Fleet) -> float:
    async with httpx.AsyncClient(timeout=10) as client:
        lines = (await client.get(f"{fleet.gateway_url}/metrics")).text.splitlines()
    counted = (line.split() for line in lines if line.startswith('midstream_gateway_migrations_total{outcome="moved"'))
    return sum(float(value) for *_, value in counted)


async def test_a_long_prompt_starts_sooner_because_requests_moved(tmp_path: Path) -> None:
    moved = await play(tmp_path / "on", "true")
    kept = await play(tmp_path / "off", "false")
    assert (moved.ended, kept.moved) == (0, 0)
    assert moved.moved >= 1
    assert kept.ended >= 1
    assert moved.waited_s < kept.waited_s
