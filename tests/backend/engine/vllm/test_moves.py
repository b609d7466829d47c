"""A request that moves between two real vLLM engines gives, byte for byte, what it would have given unmoved."""

from typing import Any

import pytest

from migration.leg import Leg
from tests.backend.engine.vllm.fleet import BLOCK_TOKENS, MAX_MODEL_TOKENS, Answer, Fleet

pytest.importorskip("vllm", reason="the light environment has no vllm")

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPT = [1000 + 7 * position for position in range(70)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 90, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True, **fields}


async def moved_and_unmoved(
    fleet: Fleet, body: dict[str, Any], *, path: str = "/v1/completions", move_at: tuple[int, ...] = (30,), mode: str = "live"
) -> tuple[Answer, Answer]:
    """The same request twice; checks that the first moved, that both are equal, and that nothing is left held anywhere."""
    moved, unmoved = await fleet.twice(path, body, move_at=move_at, mode=mode)
    if body.get("stream"):
        assert len(moved.created) == 1
        assert moved.body.endswith(b"data: [DONE]\n\n")
    return moved, unmoved


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.7},
        {"temperature": 0.8, "seed": 12, "presence_penalty": 0.9},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"min_tokens": 60, "ignore_eos": False, "stop_token_ids": list(range(0, 49000, 2))},
        {"logprobs": 4},
        {"logprobs": 2, "temperature": 0.9, "seed": 5},
        {"logit_bias": {"2000": 60, "2001": 61}, "temperature": 1.0, "seed": 2},
        {"bad_words": ["the", " river"], "temperature": 0.9, "seed": 8},
        {"max_tokens": 200},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda sampling: "+".join(sampling) or "greedy",
)
async def test_every_kind_of_sampling(fleet: Fleet, sampling: dict[str, Any]) -> None:
    await moved_and_unmoved(fleet, completion(**sampling))


async def test_structured_output(fleet: Fleet) -> None:
    body = completion(
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        temperature=0.9,
        seed=4,
        ignore_eos=False,
    )
    await moved_and_unmoved(fleet, body, move_at=(20,))


@pytest.mark.parametrize("mode", ["live", "stop_copy", "recompute"])
async def test_every_mode(fleet: Fleet, mode: str) -> None:
    moved, _ = await moved_and_unmoved(fleet, completion(temperature=0.9, seed=6), mode=mode)
    assert moved.outcome is not None
    assert (moved.outcome["bytes"] > 0) == (mode != "recompute")


@pytest.mark.parametrize("prompt_tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, MAX_MODEL_TOKENS - 95])
async def test_prompts_around_a_block_and_near_the_maximum(fleet: Fleet, prompt_tokens: int) -> None:
    prompt = [1000 + 3 * position for position in range(prompt_tokens)]
    await moved_and_unmoved(fleet, completion(prompt=prompt))


async def test_moved_at_the_first_token(fleet: Fleet) -> None:
    await moved_and_unmoved(fleet, completion(), move_at=(1,))


async def test_there_and_back(fleet: Fleet) -> None:
    moved, _ = await moved_and_unmoved(fleet, completion(max_tokens=500, temperature=0.9, seed=1), move_at=(20, 250))
    assert moved.outcome is not None
    assert moved.outcome["destination"] == moved.instance


async def test_three_times(fleet: Fleet) -> None:
    await moved_and_unmoved(fleet, completion(max_tokens=850, logprobs=1), move_at=(20, 250, 500))


async def test_three_stages(fleet: Fleet) -> None:
    slowed: list[int] = []

    async def slow_first(leg: Leg, transfer: int) -> None:
        flight = fleet.a.engine.flight(leg) or fleet.b.engine.flight(leg)
        if not slowed and flight is not None:
            slowed.append(transfer)
            await flight.wait_history(len(flight.history) + 4 * BLOCK_TOKENS)

    with fleet.a.sending(slow_first), fleet.b.sending(slow_first):
        moved, _ = await moved_and_unmoved(fleet, completion(prompt=list(range(7000, 7300)), max_tokens=400), move_at=(10,))
    assert moved.outcome is not None
    assert moved.outcome["stages"] == 3


async def test_normally_two_stages(fleet: Fleet) -> None:
    moved, _ = await moved_and_unmoved(fleet, completion(prompt=list(range(2000, 2600))))
    assert moved.outcome is not None
    assert moved.outcome["stages"] == 2


async def test_the_last_token_after_the_move(fleet: Fleet) -> None:
    for last in (31, 32, 33):
        with fleet.a.freezing_at(30), fleet.b.freezing_at(30):
            unmoved = await fleet.ask("/v1/completions", completion(max_tokens=last))
            moved = await fleet.ask("/v1/completions", completion(max_tokens=last), move_at=(20,))
        assert moved.comparable == unmoved.comparable
        assert moved.outcome is not None
        assert moved.outcome["outcome"] in ("moved", "request_ended")
        await fleet.settle()


@pytest.mark.parametrize("offset", [-6, -3, -2, -1, 0, 1, 2, 3])
async def test_stop_strings_before_across_and_after_the_move(fleet: Fleet, offset: int) -> None:
    """The stop string begins `offset` tokens from where the request is frozen: found by the source, by both, or by the destination."""
    frozen_at = 40
    plain = await fleet.ask("/v1/completions", completion())
    tokens = [token for chunk in plain.chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
    texts = [choice["text"] for chunk in plain.chunks for choice in chunk["choices"]]
    assert len(texts) >= len(tokens)
    begin = frozen_at + offset
    stop = "".join(texts[begin : begin + 3])
    assert stop.strip()
    body = completion(stop=[stop], include_stop_str_in_output=offset % 2 == 0)
    with fleet.a.freezing_at(frozen_at), fleet.b.freezing_at(frozen_at):
        unmoved = await fleet.ask("/v1/completions", body)
        for _ in range(3):  # on a busy machine the engine may be past that token before the order to freeze is there
            moved = await fleet.ask("/v1/completions", body, move_at=(10,), pace_s=0.04)
            assert moved.comparable == unmoved.comparable
            if moved.outcome is not None and moved.outcome["outcome"] == "moved":
                break
    assert b'"finish_reason":"stop"' in moved.body
    assert moved.outcome is not None
    assert moved.outcome["outcome"] == ("moved" if offset >= 0 else moved.outcome["outcome"])
    await fleet.settle()


async def test_several_at_once(fleet: Fleet) -> None:
    """Batch composition changes the last bit of bf16 sums, so texts are not compared here: counts, order and clean-up are."""
    import asyncio

    before = await fleet.settle()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                fleet.ask("/v1/completions", completion(prompt=[3000 + n * 100 + i for i in range(40)], max_tokens=400), move_at=(20 + n,))
            )
            for n in range(4)
        ]
    for task in tasks:
        answer = task.result()
        assert answer.outcome is not None
        assert answer.outcome["outcome"] == "moved", answer.outcome
        ids = [token for chunk in answer.chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
        assert len(ids) == 400
        assert answer.body.endswith(b"data: [DONE]\n\n")
    assert await fleet.settle() == before


async def test_a_destination_that_knows_the_prefix_is_sent_only_the_rest(fleet: Fleet) -> None:
    before = await fleet.settle()
    body = {**completion(prompt=list(range(5000, 5300)), max_tokens=60), "cache_salt": "shared"}
    first = await fleet.ask("/v1/completions", body)
    second = await fleet.ask("/v1/completions", body, move_at=(10,))  # now there, or back at the first: either way one side knows
    third = await fleet.ask("/v1/completions", body, move_at=(10,))
    assert second.outcome is not None
    assert third.outcome is not None
    block_bytes = fleet.a.engine.layout().block_bytes
    whole = 300 // BLOCK_TOKENS * block_bytes
    assert third.outcome["outcome"] == "moved"
    assert third.outcome["bytes"] < whole / 2
    assert {first.status, second.status, third.status} == {200}
    assert await fleet.settle() == before
