"""Answers of real engines that are cut off in their middle, and go on at the other engine: the client gets what it would have got."""

import asyncio
import base64
import json
import re
from typing import Any

import pytest

from migration.leg import RequestId
from tests.backend.engine.vllm.fleet import MODEL, PACE_S, QUIET_S, RESUME, Answer, Fleet

pytest.importorskip("vllm", reason="the light environment has no vllm")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM reads its own deprecated field
]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
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
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "horse",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer", "minimum": 0, "maximum": 40}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}
LOGPROB = re.compile(rb'(?<="logprob":)-?[0-9.e-]+')
LAST_BITS = 0.1
"""In bf16. A prefill over prompt and output computes the KV that single steps would have computed in another order."""
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "seeded": {"temperature": 1.0, "seed": 17},
    "seeded_filtered": {"temperature": 1.0, "seed": 17, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "stop": {"stop": ["zzz-never"], "min_tokens": 50},
    "tool_required": {"tools": [WEATHER], "tool_choice": "required", "temperature": 0.8, "seed": 2, "ignore_eos": False},
    "tool_auto": {"tools": [WEATHER], "tool_choice": "auto", "temperature": 0.9, "seed": 5},
    "schema": {"response_format": SCHEMA, "temperature": 0.9, "seed": 6, "ignore_eos": False},
}


def chat(stream: bool, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_completion_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}
    return {**body, "stream_options": {"include_usage": True}} if stream else body


async def both(fleet: Fleet, path: str, body: dict[str, Any], cut_at: int) -> tuple[Answer, Answer]:
    """The answer nobody disturbs, and the one that is cut off at so many tokens."""
    whole = await fleet.ask(path, body, at=fleet.a)
    await fleet.settle()
    fleet.a.mail.cut_at = cut_at
    resumed = await fleet.ask(path, body, at=fleet.a)
    assert fleet.a.mail.cut_at is None, "it was never cut"
    await fleet.settle()
    return whole, resumed


def logprobs(answer: Answer) -> list[float]:
    """In chat's form."""
    return [float(figure) for figure in LOGPROB.findall(answer.comparable)]


async def resumes(fleet: Fleet) -> int:
    text = (await fleet.client.get(f"{fleet.gateway}/metrics")).text
    return sum(
        int(float(line.split()[-1])) for line in text.splitlines() if line.startswith('midstream_gateway_resumes_total{outcome="resumed"')
    )


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_chat(fleet: Fleet, variant: str, stream: bool) -> None:
    before = await resumes(fleet)
    whole, resumed = await both(fleet, CHAT, chat(stream, **VARIANTS[variant]), cut_at=20)
    assert (whole.status, resumed.status) == (200, 200), whole.body
    assert LOGPROB.sub(b"", resumed.comparable) == LOGPROB.sub(b"", whole.comparable)
    assert logprobs(resumed) == pytest.approx(logprobs(whole), abs=LAST_BITS)
    assert len(resumed.created) == 1
    begun_anew = variant == "logprobs" and not stream
    assert await resumes(fleet) - before == (0 if begun_anew else 1)


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (MESSAGES, {}),
    "messages_tools": (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "any"}}),
    "responses": (RESPONSES, {}),
    "responses_seeded": (RESPONSES, {"temperature": 1.0, "seed": 17}),
    "responses_tools": (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required", "temperature": 0.8, "seed": 2, "ignore_eos": False}),
}
PREFILL = re.compile(rb'"(cached_tokens|cache_write_tokens)":\d+')
"""Of the engine that the answer began at; nobody knows that any more."""


def other(path: str, stream: bool, **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"messages": QUESTION, "max_tokens": 60, "temperature": 0, "stream": stream, **fields}
    return {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("kind", OTHERS)
async def test_messages_and_responses(fleet: Fleet, kind: str, stream: bool) -> None:
    before = await resumes(fleet)
    path, fields = OTHERS[kind]
    whole, resumed = await both(fleet, path, other(path, stream, **fields), cut_at=20)
    assert (whole.status, resumed.status) == (200, 200), whole.body
    assert PREFILL.sub(b"", resumed.comparable) == PREFILL.sub(b"", whole.comparable)
    assert len(resumed.created) == (path == RESPONSES)
    assert await resumes(fleet) - before == 1


@pytest.mark.parametrize("cut_at", [0, 1, 2, 59, 60])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_messages_and_responses_wherever_they_are_cut(fleet: Fleet, path: str, cut_at: int) -> None:
    whole, resumed = await both(fleet, path, other(path, True), cut_at)
    assert PREFILL.sub(b"", resumed.comparable) == PREFILL.sub(b"", whole.comparable)


@pytest.mark.parametrize("cut_at", [1, 2, 3, 59, 60])
async def test_wherever_it_is_cut(fleet: Fleet, cut_at: int) -> None:
    body = {"prompt": "The river " * 20, "max_tokens": 60, "temperature": 0.9, "seed": 1, "ignore_eos": True, "logprobs": 2, "stream": True}
    whole, resumed = await both(fleet, COMPLETIONS, body, cut_at)
    assert resumed.comparable == whole.comparable


@pytest.mark.parametrize("ending", [{"ignore_eos": True}, {"stop_token_ids": "seen"}, {"stop": "seen"}], ids=["length", "token", "text"])
async def test_known_tokens_that_are_all_of_them(fleet: Fleet, ending: dict[str, Any]) -> None:
    """What comes after the last token was not relayed any more: the answer ends as it did, and the engine runs nothing."""
    body = {"prompt": [500] * 40, "max_tokens": 30, "temperature": 0.9, "seed": 3, "stream": True, "return_token_ids": True}
    body["ignore_eos"] = True
    if "ignore_eos" not in ending:
        seen = await fleet.ask(COMPLETIONS, body, at=fleet.a)
        tokens = [token for chunk in seen.chunks for choice in chunk["choices"] for token in choice["token_ids"]]
        body |= {"stop_token_ids": [tokens[20]]} if "stop_token_ids" in ending else {"stop": [seen.text[40:46]]}
        await fleet.settle()
    whole = await fleet.ask(COMPLETIONS, body, at=fleet.a)
    tokens = [token for chunk in whole.chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    await fleet.settle()
    http = {"path": COMPLETIONS, "headers": [["x-request-id", "run-other"], ["content-type", "application/json"]]}
    sent = {"model": MODEL, **body, "cache_salt": "other"}
    order = {"request": "run-other", "epoch": 1000, "tier": "normal", "created": 5, "tokens": tokens}
    order["http"] = {**http, "body": base64.b64encode(json.dumps(sent).encode()).decode()}
    told = (await fleet.client.post(f"{fleet.b.url}{RESUME}", json=order)).content
    events = re.sub(rb"(?m)^id: .*\n", b"", told)
    resumed = Answer(RequestId("run-other"), fleet.b.id, 200, events)
    assert resumed.comparable == whole.comparable
    await fleet.settle()


async def test_a_stop_string_between_known_and_fresh_tokens(fleet: Fleet) -> None:
    """The text that is held back for a stop string is not lost, and found again where it is."""
    body = {"prompt": [500] * 40, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    text = (await fleet.ask(COMPLETIONS, body, at=fleet.a)).text
    await fleet.settle()
    middle = len(text) // 2
    body["stop"] = [text[middle : middle + 12]]
    for cut_at in (18, 24, 28):
        whole = await fleet.ask(COMPLETIONS, body, at=fleet.a)
        await fleet.settle()
        fleet.a.mail.cut_at = cut_at
        resumed = await fleet.ask(COMPLETIONS, body, at=fleet.a)
        fleet.a.mail.cut_at = None
        await fleet.settle()
        assert resumed.comparable == whole.comparable


async def test_a_resumed_stream_can_move(fleet: Fleet) -> None:
    body = {"prompt": [501] * 40, "max_tokens": 300, "temperature": 0.9, "seed": 8, "ignore_eos": True, "stream": True, "logprobs": 1}
    whole = await fleet.ask(COMPLETIONS, body, at=fleet.a)
    await fleet.settle()
    fleet.a.mail.cut_at = 20
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(fleet.ask(COMPLETIONS, body, at=fleet.a, pace_s=PACE_S))
        async with asyncio.timeout(QUIET_S):
            while not any(flight.replay is not None and flight.replay.finished for flight in fleet.b.flights()):
                await asyncio.sleep(0.001)
        (flight,) = fleet.b.flights()
        outcome = await fleet.move(flight.leg.request)
    assert (outcome["outcome"], flight.leg.epoch) == ("moved", 1000)
    assert asking.result().text == whole.text
    await fleet.settle()
