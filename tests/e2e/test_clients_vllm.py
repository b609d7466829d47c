"""Clients that people use, on real parts: LangChain's OpenAI client, Anthropic's SDK and curl, through the gateway, on vLLM."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.e2e.fleet import Fleet

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:langchain_core"),
]

QUESTION = "Tell me the story of a rider who changed horses in the middle of a river."
TOKENS = 60


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(vllm_fleet: Fleet) -> AsyncIterator[Fleet]:
    await vllm_fleet.mend()
    yield vllm_fleet
    await vllm_fleet.settle()


def langchain(fleet: Fleet, request: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=fleet.model,
        base_url=f"{fleet.gateway_url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_completion_tokens=TOKENS,
        max_retries=0,
        default_headers={"x-request-id": request},
        extra_body={"ignore_eos": True, "cache_salt": request},
        stream_usage=True,
    )


async def streamed(fleet: Fleet, request: str) -> tuple[list[str], dict[str, Any]]:
    """The texts of the chunks, and the usage."""
    texts: list[str] = []
    usage: dict[str, Any] = {}
    async for chunk in langchain(fleet, request).astream(QUESTION):
        texts += [str(chunk.content)] if chunk.content else []
        usage = dict(chunk.usage_metadata or usage)
    return texts, usage


async def test_langchain_reads_a_moved_stream_as_an_unmoved_one(fleet: Fleet) -> None:
    unmoved = await streamed(fleet, fleet.next_request())
    request = fleet.next_request()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(streamed(fleet, request))
        await fleet.locate(request, 6)
        assert (await fleet.move(request))["outcome"] == "moved"
        assert not reading.done()
    assert reading.result() == unmoved
    assert unmoved[1]["output_tokens"] == TOKENS


async def test_langchain_without_a_stream(fleet: Fleet) -> None:
    answer = await langchain(fleet, fleet.next_request()).ainvoke(QUESTION)
    texts, _ = await streamed(fleet, fleet.next_request())
    assert answer.content == "".join(texts)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_curl_reads_a_moved_stream(fleet: Fleet) -> None:
    request = fleet.next_request()
    body = {"model": fleet.model, "prompt": QUESTION, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    command = ["curl", "-sSN", f"{fleet.gateway_url}/v1/completions", "-H", "content-type: application/json"]
    command += ["-H", f"x-request-id: {request}", "-d", json.dumps(body)]
    async with asyncio.TaskGroup() as group:
        curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        reading = group.create_task(curl.communicate())
        await fleet.locate(request, 6)
        assert (await fleet.move(request))["outcome"] == "moved"
    shown, complaints = reading.result()
    assert (curl.returncode, complaints) == (0, b"")
    events = [line.removeprefix(b"data: ") for line in shown.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert sum(bool(json.loads(event)["choices"]) for event in events[:-1]) == TOKENS


def asked_of_claude(fleet: Fleet, request: str) -> dict[str, Any]:
    """Arguments for `messages.stream`."""
    sampled = {"temperature": 0, "cache_salt": request}
    messages = [{"role": "user", "content": QUESTION}]
    return {
        "model": fleet.model,
        "max_tokens": TOKENS,
        "system": "You tell long stories.",
        "messages": messages,
        "extra_headers": {"x-request-id": request},
        "extra_body": sampled,
    }


async def read_message(fleet: Fleet, request: str) -> list[Any]:
    """Every event that the SDK makes of the stream, its own among them, and the message as it is at the end."""
    async with (
        anthropic.AsyncAnthropic(base_url=fleet.gateway_url, api_key="unused", max_retries=0) as client,
        client.messages.stream(**asked_of_claude(fleet, request)) as stream,
    ):
        events = [event async for event in stream]
        return [*events, await stream.get_final_message()]


def read_message_blocking(fleet: Fleet, request: str) -> list[Any]:
    """The same with the synchronous client."""
    with (
        anthropic.Anthropic(base_url=fleet.gateway_url, api_key="unused", max_retries=0) as client,
        client.messages.stream(**asked_of_claude(fleet, request)) as stream,
    ):
        return [*stream, stream.get_final_message()]


async def create_message(fleet: Fleet, request: str) -> list[Any]:
    """A whole answer."""
    async with anthropic.AsyncAnthropic(base_url=fleet.gateway_url, api_key="unused", max_retries=0) as client:
        return [await client.messages.create(**asked_of_claude(fleet, request))]


async def read_response(fleet: Fleet, request: str) -> list[Any]:
    """OpenAI's SDK, the events of a streamed response."""
    async with openai.AsyncOpenAI(base_url=f"{fleet.gateway_url}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.responses.create(
            model=fleet.model,
            input=QUESTION,
            max_output_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_headers={"x-request-id": request},
            extra_body={"ignore_eos": True, "cache_salt": request},
        )
        return [event async for event in stream]


def shown(answers: list[Any], request: str) -> list[str]:
    """What an SDK made of a stream, but for what differs between any two runs: times, and names, for each of which stands its number."""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"{found[1]}-{len(names)}")

    texts = [re.sub(r'"created_at":[\d.]+', "", answer.model_dump_json()).replace(request, "R") for answer in answers]
    return [re.sub(r"(resp|msg)_[0-9a-f]{16}", number, text) for text in texts]


Client = Callable[[Fleet, str], Coroutine[Any, Any, list[Any]]]


async def in_thread(fleet: Fleet, request: str) -> list[Any]:
    return await asyncio.to_thread(read_message_blocking, fleet, request)


@pytest.mark.parametrize("client", [read_message, in_thread, create_message, read_response])
async def test_sdks_read_moved_messages_and_responses_as_unmoved_ones(fleet: Fleet, client: Client) -> None:
    first = fleet.next_request()
    unmoved = await client(fleet, first)
    await fleet.settle()
    second = fleet.next_request()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(client(fleet, second))
        await fleet.locate(second, 6)
        assert (await fleet.move(second))["outcome"] == "moved"
        assert not reading.done()
    assert shown(reading.result(), second) == shown(unmoved, first)
    last = unmoved[-1]
    usage = last.response.usage if client is read_response else last.usage
    assert usage.output_tokens > 40
    if client is not read_response:
        assert len(last.content[0].text) > 100
