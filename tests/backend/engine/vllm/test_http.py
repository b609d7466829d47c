"""Every shape of request through the gateway to two real engines, moved in its middle: what the client gets is what it would have got."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.backend.engine.vllm.fleet import MODEL, PACE_S, QUIET_S, Fleet

pytest.importorskip("vllm", reason="the light environment has no vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM reads its own deprecated field
]

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Count slowly. " + "One, two, three. " * 12}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]},
    },
}
FUNCTION = {"type": "function", **WEATHER["function"]}
TOOL = {"name": "get_weather", "description": "The weather somewhere", "input_schema": FUNCTION["parameters"]}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "max_completion_tokens": 100, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"temperature": 1.0, "seed": 17, "top_p": 0.95},
        {"stop": ["zzz-never"], "min_tokens": 50},
        {"tools": [WEATHER], "tool_choice": "required", "temperature": 0.8, "seed": 2, "ignore_eos": False},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "temperature": 0.8, "seed": 3},
        {"tools": [WEATHER], "tool_choice": "auto", "temperature": 0.9, "seed": 5},
        {"response_format": {"type": "json_object"}, "temperature": 0.9, "seed": 6, "ignore_eos": False},
    ],
    ids=lambda fields: "+".join(fields) or "greedy",
)
async def test_chat(fleet: Fleet, fields: dict[str, Any], stream: bool) -> None:
    body = chat(stream=stream, **fields, **({"stream_options": {"include_usage": True}} if stream else {}))
    await fleet.twice(CHAT, body, move_at=(10,))


MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (MESSAGES, {}),
    "messages_stop": (MESSAGES, {"stop_sequences": ["zzz-never"], "system": "Be brief."}),
    "messages_tools": (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}),
    "responses": (RESPONSES, {}),
    "responses_seeded": (RESPONSES, {"temperature": 1.0, "seed": 17, "top_p": 0.95, "instructions": "Be brief."}),
    "responses_logprobs": (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "responses_tools": (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required", "temperature": 0.8, "seed": 2, "ignore_eos": False}),
    "responses_stored": (RESPONSES, {"store": True}),
}


def other(path: str, stream: bool, **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"messages": QUESTION, "max_tokens": 100, "temperature": 0, "stream": stream, **fields}
    return {"input": QUESTION, "max_output_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("kind", OTHERS)
async def test_messages_and_responses(fleet: Fleet, kind: str, stream: bool) -> None:
    path, fields = OTHERS[kind]
    moved, _ = await fleet.twice(path, other(path, stream, **fields), move_at=(10,))
    assert len(moved.created) == (path == RESPONSES)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_there_and_back_again(fleet: Fleet, path: str) -> None:
    body = other(path, True)
    unmoved = await fleet.ask(path, body)
    moved = await fleet.ask(path, body, move_at=(10, 40))
    assert moved.outcome is not None
    assert moved.outcome["outcome"] == "moved"
    assert moved.comparable == unmoved.comparable
    await fleet.settle()


async def test_a_response_that_an_engine_stores_stays_where_it_is(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine will be asked for it by the names that it has drawn."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    kept = await fleet.ask(RESPONSES, other(RESPONSES, True, store=True), move_at=(10,))
    assert kept.outcome is not None
    assert (kept.outcome["result"], kept.outcome["outcome"]) == ("unmovable", "stored")
    free = await fleet.ask(RESPONSES, other(RESPONSES, True, store=False), move_at=(10,))
    assert free.outcome is not None
    assert free.outcome["outcome"] == "moved"
    await fleet.settle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(max_completion_tokens=800)),
        (MESSAGES, other(MESSAGES, False, max_tokens=800)),
        (RESPONSES, other(RESPONSES, False, max_output_tokens=800)),
        (RESPONSES, other(RESPONSES, False, max_output_tokens=800, tools=[{"type": "web_search_preview"}])),
        ("/v1/chat/completions/batch", {**chat(max_completion_tokens=800), "messages": [QUESTION]}),
    ],
    ids=["chat", "messages", "responses", "responses_passed", "batch"],
)
async def test_a_client_that_leaves_frees_the_engine_within_a_second(fleet: Fleet, path: str, body: dict[str, Any], stream: bool) -> None:
    if stream and path == "/v1/chat/completions/batch":
        pytest.skip("batches do not stream")
    await fleet.settle()
    full = fleet.a.free_tokens + fleet.b.free_tokens
    request = fleet.next_request(PACE_S)
    sent = {"model": MODEL, "cache_salt": request, **body, "stream": stream}

    async def leave_after_a_while() -> None:
        asked = fleet.client.stream("POST", fleet.gateway + path, json=sent, headers={"x-request-id": request})
        async with asked as response:
            assert response.status_code == 200
            parts = response.aiter_raw()
            await anext(parts)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(leave_after_a_while())
        async with asyncio.timeout(QUIET_S):
            while fleet.a.free_tokens + fleet.b.free_tokens == full:  # the engine says so when it likes
                await asyncio.sleep(0.01)
        assert not asking.done()
        asking.cancel()
    async with asyncio.timeout(1.0):
        while fleet.a.flights() or fleet.b.flights() or fleet.a.free_tokens + fleet.b.free_tokens != full:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("echo", [False, True])
async def test_a_plain_completion(fleet: Fleet, echo: bool) -> None:
    body = {"prompt": "The river " * 20, "max_tokens": 80, "temperature": 0.9, "seed": 1, "ignore_eos": True, "logprobs": 2, "echo": echo}
    unmoved = await fleet.ask("/v1/completions", body)
    moved = await fleet.ask("/v1/completions", body, move_at=(10,))
    assert moved.outcome is not None
    if echo:  # vLLM computes log-probabilities of the prompt for it, which are not carried
        assert moved.outcome["outcome"] in ("prompt_logprobs", "moved")
    else:
        assert moved.outcome["outcome"] == "moved"
    assert moved.comparable == unmoved.comparable
    await fleet.settle()


async def test_text_of_many_bytes_a_character_at_the_edge_of_the_move(fleet: Fleet) -> None:
    """The random model is steered to tokens that are pieces of emoji and CJK characters; the move falls between their bytes."""
    tokenizer = fleet.a.engine._llm.get_tokenizer()
    pieces = tokenizer.encode("🌊🐎 河流 渡河 👩‍👩‍👧 漢字かな", add_special_tokens=False)
    body = {"prompt": [500] * 40, "max_tokens": 90, "temperature": 1.0, "seed": 9, "ignore_eos": True, "stream": True}
    body["allowed_token_ids"] = sorted(set(pieces))
    for position in (20, 21, 22, 23):
        with fleet.a.freezing_at(position + 10), fleet.b.freezing_at(position + 10):
            unmoved = await fleet.ask("/v1/completions", body)
            moved = await fleet.ask("/v1/completions", body, move_at=(position,))
        assert moved.outcome is not None
        assert moved.outcome["outcome"] == "moved"
        assert moved.comparable == unmoved.comparable
        assert any(ord(character) > 0x2E80 for character in moved.text)
        await fleet.settle()


async def test_the_openai_sdk_reads_a_moved_stream(fleet: Fleet) -> None:
    body = {
        "model": MODEL,
        "messages": QUESTION,
        "max_completion_tokens": 90,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def read(client: openai.AsyncOpenAI, move: bool) -> tuple[str, str | None, int]:
        request = fleet.next_request(PACE_S if move else 0)
        stream = await client.chat.completions.create(
            **body,  # type: ignore[call-overload]  # the SDK's overloads want literals
            extra_body={"ignore_eos": True, "cache_salt": request},
            extra_headers={"x-request-id": request},
        )
        text, reason, usage = "", None, 0
        async with asyncio.TaskGroup() as group:
            mover = None
            async for chunk in stream:
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
                    if move and mover is None:
                        mover = group.create_task(fleet.move(request))
                if chunk.usage:
                    usage = chunk.usage.completion_tokens
        if mover is not None:
            assert mover.result()["outcome"] == "moved"
        return text, reason, usage

    async with openai.AsyncOpenAI(base_url=f"{fleet.gateway}/v1", api_key="unused", max_retries=0) as client:
        unmoved, moved = await read(client, move=False), await read(client, move=True)
    assert moved == unmoved
    assert moved[1:] == ("length", 90)
    await fleet.settle()


async def test_errors_of_the_engine_pass_through(fleet: Fleet) -> None:
    direct = await fleet.client.post(f"{fleet.a.url}{CHAT}", json={"model": MODEL, "messages": QUESTION, "temperature": -3})
    through = await fleet.client.post(f"{fleet.gateway}{CHAT}", json={"model": MODEL, "messages": QUESTION, "temperature": -3})
    assert (direct.status_code, through.status_code) == (400, 400)
    assert json.loads(through.content) == json.loads(direct.content)


async def test_other_routes_of_vllm_stay_available(fleet: Fleet) -> None:
    answer = await fleet.client.post(f"{fleet.a.url}/tokenize", json={"model": MODEL, "prompt": "The river"})
    assert answer.status_code == 200
    assert answer.json()["count"] >= 2
    assert (await fleet.client.get(f"{fleet.a.url}/metrics")).status_code == 200
    assert (await fleet.client.get(f"{fleet.a.url}/version")).status_code == 200
