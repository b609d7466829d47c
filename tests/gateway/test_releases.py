"""A request that was preempted waits in line, and what it left free is others'. Real backends with modelled engines, over real HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from backend.registry.memory import MemoryStore
from gateway.app import build_app
from gateway.policy.config import MidstreamPolicy
from gateway.policy.tier import Tiers
from gateway.settings import GatewaySettings
from tests.gateway.conftest import live, until
from tests.gateway.fake_fleet import Site, Stream, metrics, site

PROMPT, TOKENS = 300, 600
"""Two of these grow side by side in 1,024 tokens until the later one is preempted, with 212 tokens of its answer told."""
ENGINE = {"capacity_blocks": 64, "max_model_tokens": 1024, "decode_base_s": 0.004, "prefill_per_token_s": 1e-6}
TOLD = 200


class Scene:
    """One instance, its gateway, and who asks."""

    def __init__(self, url: str, store: MemoryStore, where: Site, tasks: asyncio.TaskGroup) -> None:
        self.url, self.store, self.where, self.tasks = url, store, where, tasks

    async def ahead(self) -> int:
        return (await self.store.line.look("fake", 9)).ahead

    async def is_in_line(self) -> bool:
        return bool((await self.store.line.look("fake", 9)).standings)

    async def ask(self, name: str, prompt_tokens: int, max_tokens: int, tier: str = "normal") -> Stream:
        stream = Stream(name)
        self.tasks.create_task(stream.read(self.url, prompt_tokens, max_tokens, tier))
        return stream

    async def grow(self, tier: str = "normal") -> tuple[Stream, Stream]:
        """Two until the second is preempted."""
        first = await self.ask("first", PROMPT, TOKENS, tier)
        await until(first.started.is_set)
        second = await self.ask("second", PROMPT, TOKENS, tier)
        await until(lambda: self.where.engine.load().preemptions > 0, within_s=20)
        assert second.events > TOLD
        return first, second


@asynccontextmanager
async def scene(**policy: object) -> AsyncIterator[Scene]:
    store = MemoryStore(time.monotonic)
    rules = MidstreamPolicy(growth=0.0, **policy).build(Tiers())  # type: ignore[arg-type]
    settings = GatewaySettings.model_validate({"keepalive_interval_s": 0})
    async with (
        site("i1", store, **ENGINE) as where,
        live(build_app(settings, store, policy=rules)) as url,
        asyncio.TaskGroup() as tasks,
    ):
        yield Scene(url, store, where, tasks)


def text_of(stream: Stream) -> str:
    events = [line[6:] for line in stream.text.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def test_others_start_where_it_ran_and_its_answer_goes_on() -> None:
    async with scene() as here:
        first, second = await here.grow()
        late = await here.ask("late", 200, 5)
        await until(lambda: late.done, within_s=10)
        assert not first.done
        assert not second.done
        await until(lambda: first.done and second.done, within_s=20)
        for stream in (first, second, late):
            assert stream.status == 200
            assert stream.text.endswith(b"data: [DONE]\n\n")
        assert text_of(first) == text_of(second)  # the same prompt and the same seed
        counted = await metrics(here.url)
        assert counted['midstream_gateway_resumes_total{outcome="resumed",reason="preempted"}'] >= 1
        async with httpx.AsyncClient() as client:
            told = (await client.get(f"{here.url}/admin/decisions", params={"kind": "release"})).json()["decisions"]
        assert told[0]["requests"] == ["second"]
        assert told[0]["chosen"] == ["i1"]
        assert told[0]["decision"]["sources"] == ["i1"]


@pytest.mark.parametrize("policy", [{"release": False}, {"release_tokens": 1000}])
async def test_else_it_keeps_its_place_and_what_it_left_free(policy: dict[str, object]) -> None:
    async with scene(**policy) as here:
        first, second = await here.grow()
        late = await here.ask("late", 200, 5)
        await until(lambda: first.events > 500, within_s=20)
        assert not late.started.is_set()
        await until(lambda: first.done and second.done and late.done, within_s=20)
        assert text_of(first) == text_of(second)
        assert not [name for name in await metrics(here.url) if "resumes" in name and "preempted" in name]


@pytest.mark.parametrize(("stand_back_s", "tier", "stands_back"), [(20.0, "normal", True), (0.0, "normal", False), (20.0, "high", False)])
async def test_it_stands_back_for_who_came_soon_after_in_its_tier(stand_back_s: float, tier: str, stands_back: bool) -> None:
    """When the first one is over, there is room for the preempted one or for the late one, which is a normal one."""
    async with scene(stand_back_s=stand_back_s, ahead=0, age_step_s=0) as here:
        first, second = await here.grow(tier)
        await until(here.is_in_line, within_s=20)
        told = second.events
        late = await here.ask("late", 600, 5)
        await until(lambda: late.started.is_set() or second.events > told + 50, within_s=20)
        assert first.done
        assert late.started.is_set() is stands_back
        await until(lambda: late.done and second.done, within_s=20)
        assert text_of(first) == text_of(second)


async def test_one_that_is_bound_ahead_of_room_is_so_until_it_goes_on() -> None:
    async with scene(stand_back_s=0, age_step_s=0.02, aged_share=1.0) as here:
        first, second = await here.grow()

        async def is_ahead() -> bool:
            return await here.ahead() == 1

        async def is_not() -> bool:
            return await here.ahead() == 0

        await until(is_ahead)
        told = second.events
        await until(lambda: second.events > told, within_s=20)
        await until(is_not)
        assert not second.done
        await until(lambda: first.done and second.done, within_s=20)


async def test_one_that_cannot_be_gone_on_with_keeps_its_place() -> None:
    """Its answer tells the figures of all its tokens at the end, and those told at another instance would be lost."""
    async with scene() as here, httpx.AsyncClient(timeout=60) as client:
        first = await here.ask("first", PROMPT, TOKENS)
        await until(first.started.is_set)
        body = {"model": "fake", "prompt": [7] * PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "seed": 3, "logprobs": 1}
        asking = here.tasks.create_task(client.post(f"{here.url}/v1/completions", json=body))
        await until(lambda: here.where.engine.load().preemptions > 0, within_s=20)
        answer = await asking
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == TOKENS
        assert not [name for name in await metrics(here.url) if "resumes" in name and "preempted" in name]
