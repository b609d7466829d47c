"""The front door on real parts: OpenAI's own SDK, the gateway and two vLLM backends as processes, each request moved in mid-answer.

What the SDK makes of it is compared, object by object, with an unmoved run.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from deploy.model import NAME
from deploy.settings import DeploySettings
from tests.e2e.fleet import Fleet

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

QUESTION = [{"role": "user", "content": "Tell me the story of a rider who changed horses in the middle of a river."}]
SAYING = "渡河の途中で馬を換えるな 🐎🌊 换马不换河 👩‍🚀🇫🇷 — así fue, 강"
"""Forced upon the model: hardly a token of it is a whole character, so the move falls between the bytes of one."""
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 12, "maxItems": 12}
ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Llanfairpwllgwyngyll"]}, "numbers": NUMBERS},
    "required": ["city", "numbers"],
    "additionalProperties": False,
}
PLACE = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch"
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": [PLACE]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go_to", "description": "Goes to a place", "strict": True, "parameters": PARAMETERS}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "address", "schema": ADDRESS, "strict": True}}
LONG = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}

CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"messages": QUESTION, "temperature": 0, **LONG},
    "seeded": {"messages": QUESTION, "temperature": 0.9, "seed": 7, "logprobs": True, "top_logprobs": 2, **LONG},
    "schema": {"messages": QUESTION, "temperature": 0, "max_tokens": 200, "response_format": SCHEMA},
    "tools": {
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 160,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "saying": {"messages": QUESTION, "temperature": 0, "max_tokens": 200, "extra_body": {"structured_outputs": {"choice": [SAYING]}}},
}
COMPLETION = {"prompt": "Never change horses in the middle of a stream, for", "temperature": 0.8, "seed": 3, "logprobs": 1, **LONG}


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(vllm_fleet: Fleet) -> AsyncIterator[Fleet]:
    await vllm_fleet.mend()
    yield vllm_fleet
    await vllm_fleet.settle()


def call(fleet: Fleet, request: str, fields: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """Arguments for `create`. Each request has its own salt: what is in a prefix cache must not change a single bit."""
    arguments = {"model": fleet.model, **fields, "extra_headers": {"x-request-id": request}}
    arguments["extra_body"] = {**fields.get("extra_body", {}), "cache_salt": request}
    if "tools" in fields:
        arguments["logit_bias"] = dict.fromkeys(blank_tokens(), -100)
    return {**arguments, "stream": True, "stream_options": {"include_usage": True}} if stream else arguments


@cache
def blank_tokens() -> list[str]:
    """Ids of all tokens of nothing but blanks, which a small model left to itself repeats between two braces until its answer is full."""
    vocabulary = json.loads((DeploySettings().models / NAME / "tokenizer.json").read_text())["model"]["vocab"]
    return [str(number) for token, number in vocabulary.items() if not token.strip("ĠĊĉč")]


def shown(answers: list[Any], request: str) -> list[str]:
    """What the SDK made of an answer or of each chunk, but for what differs between any two runs."""
    created = {answer.created for answer in answers}
    assert len(created) == 1
    ids = {call.id for answer in answers for choice in answer.choices for call in calls_of(choice) if call.id}
    texts = [answer.model_copy(update={"created": 0}).model_dump_json().replace(request, "R") for answer in answers]
    for number, one in enumerate(sorted(ids)):
        texts = [text.replace(one, f"call-{number}") for text in texts]
    return texts


def calls_of(choice: Any) -> list[Any]:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return getattr(said, "tool_calls", None) or []


async def ask(fleet: Fleet, resource: str, fields: Mapping[str, Any], *, stream: bool, move: bool, sync: bool = False) -> list[Any]:
    """All that the SDK answers; with `move`, ordered once a few tokens are there."""
    request = fleet.next_request()
    arguments = call(fleet, request, fields, stream=stream)
    base = f"{fleet.gateway_url}/v1"
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(
            asyncio.to_thread(_ask_sync, base, resource, arguments) if sync else _ask_async(base, resource, arguments)
        )
        if move:
            await fleet.locate(request, 6)
            outcome = await fleet.move(request)
            assert outcome["outcome"] == "moved", outcome
            assert not asking.done()
    return [request, *asking.result()]


async def _ask_async(base: str, resource: str, arguments: Mapping[str, Any]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client:
        create = client.chat.completions.create if resource == "chat" else client.completions.create
        answer: Any = await create(**arguments)
        return [chunk async for chunk in answer] if arguments.get("stream") else [answer]


def _ask_sync(base: str, resource: str, arguments: Mapping[str, Any]) -> list[Any]:
    with openai.OpenAI(base_url=base, api_key="unused", max_retries=0) as client:
        create = client.chat.completions.create if resource == "chat" else client.completions.create
        answer: Any = create(**arguments)
        return list(answer) if arguments.get("stream") else [answer]


async def moved_and_unmoved(fleet: Fleet, resource: str, fields: Mapping[str, Any], *, stream: bool, sync: bool = False) -> list[Any]:
    """The answer that was moved, equal to one that was not."""
    first, *unmoved = await ask(fleet, resource, fields, stream=stream, move=False, sync=sync)
    await fleet.settle()
    second, *moved = await ask(fleet, resource, fields, stream=stream, move=True, sync=sync)
    assert shown(moved, second) == shown(unmoved, first)
    usage = moved[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 20
    return moved


@pytest.mark.parametrize(
    ("kind", "stream"),
    [("seeded", True), ("seeded", False), ("schema", True), ("saying", True), ("saying", False), ("tools", True), ("tools", False)],
)
async def test_a_moved_chat(fleet: Fleet, kind: str, stream: bool) -> None:
    answers = await moved_and_unmoved(fleet, "chat", CHATS[kind], stream=stream)
    choices = [choice for answer in answers for choice in answer.choices]
    said = "".join((choice.delta.content if stream else choice.message.content) or "" for choice in choices)
    called = [call.function for choice in choices for call in calls_of(choice) if not getattr(call, "index", 0)]
    if kind == "saying":
        assert said == SAYING
    elif kind == "schema":
        assert_address(said)
    elif kind == "tools":
        assert called[0].name == "go_to"
        arguments = "".join(function.arguments or "" for function in (called if stream else called[:1]))
        assert json.loads(arguments) == {"place": PLACE}


def assert_address(text: str) -> None:
    address = json.loads(text)
    assert address["city"] == "Llanfairpwllgwyngyll"
    assert len(address["numbers"]) == 12


async def test_a_moved_completion(fleet: Fleet) -> None:
    await moved_and_unmoved(fleet, "completions", COMPLETION, stream=True)


@pytest.mark.parametrize(("resource", "stream"), [("chat", True), ("completions", False)])
async def test_with_the_synchronous_client(fleet: Fleet, resource: str, stream: bool) -> None:
    await moved_and_unmoved(fleet, resource, CHATS["greedy"] if resource == "chat" else COMPLETION, stream=stream, sync=True)


class Address(BaseModel):
    """ADDRESS, as a type that the SDK makes of an answer."""

    model_config = {"extra": "forbid"}
    city: Literal["Llanfairpwllgwyngyll"]
    numbers: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(min_length=12, max_length=12)]


async def read_parsed(base: str, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """What the SDK's streaming helper ends with, and the kinds of its events."""
    async with (
        openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client,
        client.chat.completions.stream(**arguments, response_format=Address) as stream,
    ):
        kinds: list[str] = [event.type async for event in stream]
        return (await stream.get_final_completion()).choices[0].message, kinds


def read_parsed_blocking(base: str, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The same with the synchronous client."""
    with (
        openai.OpenAI(base_url=base, api_key="unused", max_retries=0) as client,
        client.chat.completions.stream(**arguments, response_format=Address) as stream,
    ):
        kinds: list[str] = [event.type for event in stream]
        return stream.get_final_completion().choices[0].message, kinds


@pytest.mark.parametrize("sync", [False, True])
async def test_a_moved_stream_through_the_helper_that_parses_it(fleet: Fleet, sync: bool) -> None:
    fields = {name: value for name, value in CHATS["schema"].items() if name != "response_format"}

    async def ask_parsed(*, move: bool) -> tuple[Any, list[str]]:
        request = fleet.next_request()
        base, arguments = f"{fleet.gateway_url}/v1", call(fleet, request, fields, stream=False)
        async with asyncio.TaskGroup() as group:
            reading = asyncio.to_thread(read_parsed_blocking, base, arguments) if sync else read_parsed(base, arguments)
            asking = group.create_task(reading)
            if move:
                await fleet.locate(request, 6)
                outcome = await fleet.move(request)
                assert outcome["outcome"] == "moved", outcome
                assert not asking.done()
        return asking.result()

    unmoved = await ask_parsed(move=False)
    await fleet.settle()
    said, kinds = await ask_parsed(move=True)
    assert (said, kinds) == unmoved
    assert isinstance(said.parsed, Address)
    assert kinds.count("content.delta") > 20
    assert kinds[-1] == "content.done"


async def test_several_choices_are_served_where_they_are(fleet: Fleet) -> None:
    request = fleet.next_request()
    arguments = call(fleet, request, CHATS["seeded"] | {"n": 2}, stream=True)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_ask_async(f"{fleet.gateway_url}/v1", "chat", arguments))
        await fleet.locate(request, 6)
        outcome = await fleet.move(request)
    assert (outcome["result"], outcome["outcome"]) == ("unmovable", "n")
    ended = {choice.index: choice.finish_reason for chunk in asking.result() for choice in chunk.choices if choice.finish_reason}
    assert ended == {0: "length", 1: "length"}
