"""Clients that people use, on real parts: LangChain's OpenAI client and curl, through the gateway, on vLLM."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

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
