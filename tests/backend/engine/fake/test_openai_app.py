import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
import uvicorn

from backend.engine.fake.engine import FakeEngine, build_fake_engine
from backend.engine.fake.settings import FakeSettings

HELLO: Any = [{"role": "user", "content": "Tell me of the river."}]


@dataclass(frozen=True)
class Server:
    engine: FakeEngine
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[Server]:
    """A fake engine's OpenAI server on a port of its own."""
    engine = build_fake_engine(FakeSettings.model_validate({"time_scale": 0, "max_model_tokens": 1024} | settings), "127.0.0.1")
    config = uvicorn.Config(engine.openai_app, port=0, lifespan="off", log_level="warning", ws="none")
    server = uvicorn.Server(config)
    async with engine.running(), asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            async with (
                openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
                httpx.AsyncClient(base_url=url) as http,
            ):
                yield Server(engine, url, client, http)
        finally:
            server.should_exit = True


def events(body: str) -> list[dict[str, Any]]:
    lines = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_stream_has_a_role_first_a_reason_last_and_the_text_of_a_plain_answer() -> None:
    async with serving() as server:
        body = {"model": "fake", "messages": HELLO, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        plain = (await server.http.post("/v1/chat/completions", json=body)).json()
        answer = await server.http.post("/v1/chat/completions", json=body | {"stream": True}, headers={"x-request-id": "abc"})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = events(answer.text)
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len(chunks) == 61
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == plain["choices"][0]["message"]["content"]
        assert any(ord(character) > 0x7F for character in text)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 60 + ["length"]
        assert not any("usage" in chunk for chunk in chunks)
        assert plain["usage"]["completion_tokens"] == 60
        assert plain["choices"][0]["finish_reason"] == "length"


async def test_the_sdk_streams_and_counts() -> None:
    async with serving() as server:
        stream = await server.client.chat.completions.create(
            model="fake",
            messages=HELLO,
            max_completion_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 30
        assert chunks[-1].usage.total_tokens == 30 + chunks[-1].usage.prompt_tokens
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * 31


async def test_continuous_usage_counts_up() -> None:
    async with serving() as server:
        body = {
            "prompt": "x",
            "max_tokens": 5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        chunks = events((await server.http.post("/v1/completions", json=body)).text)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]


async def test_a_seed_repeats_an_answer_and_no_seed_does_not() -> None:
    async with serving() as server:

        async def text(**more: object) -> str:
            body = {"prompt": "x", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True} | more
            return str((await server.http.post("/v1/completions", json=body)).json()["choices"][0]["text"])

        assert await text(seed=3) == await text(seed=3)
        assert await text(seed=3) != await text(seed=4)
        assert await text() != await text()
        assert await text(temperature=0) == await text(temperature=0)


async def test_several_choices_and_several_prompts() -> None:
    async with serving() as server:
        chat = await server.client.chat.completions.create(
            model="fake", messages=HELLO, n=3, seed=1, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in chat.choices}) == 3
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 36
        many = await server.client.completions.create(model="fake", prompt=["a", "b"], n=2, temperature=0, max_tokens=5)
        texts = [choice.text for choice in many.choices]
        assert texts[0] == texts[1] != texts[2] == texts[3]
        stream = await server.client.chat.completions.create(
            model="fake", messages=HELLO, n=3, seed=1, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        streamed = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == {choice.index: choice.message.content for choice in chat.choices}


@pytest.mark.parametrize("prompt", ["abcdefgh", ["abcdefgh"], [100, 2, 3], [[100, 2, 3]]])
async def test_all_four_forms_of_a_prompt(prompt: object) -> None:
    async with serving() as server:
        answer = (await server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, "ignore_eos": True})).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["usage"]["prompt_tokens"] == (3 if isinstance(prompt, list) and prompt != ["abcdefgh"] else 2)
        assert answer["id"].startswith("cmpl-")


async def test_a_stop_string_ends_the_text_before_it_and_the_engine_with_it() -> None:
    async with serving() as server:
        body = {"prompt": "stop", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        text = (await server.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        stop = text[100:108]
        choice = (await server.http.post("/v1/completions", json=body | {"stop": [stop, "never there"]})).json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = events((await server.http.post("/v1/completions", json=body | {"stop": stop, "stream": True})).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert chunks[-1]["choices"][0]["stop_reason"] == stop
        assert server.engine.load().free_tokens == server.engine.load().capacity_tokens


async def test_an_answer_may_end_by_itself() -> None:
    async with serving(eos_one_in=10) as server:
        answer = (await server.http.post("/v1/chat/completions", json={"messages": HELLO})).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 900


async def test_log_probabilities() -> None:
    async with serving() as server:
        chat = await server.client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 8
        assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob < 0 for entry in logprobs.content)
        text = await server.client.completions.create(model="fake", prompt="x", max_tokens=8, logprobs=0, extra_body={"ignore_eos": True})
        assert text.choices[0].logprobs is not None
        offsets = text.choices[0].logprobs.text_offset
        assert offsets is not None
        assert (len(offsets), offsets[0], offsets == sorted(offsets)) == (8, 0, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "about"),
    [
        ("/v1/chat/completions", b"{nonsense", 400, "JSON"),
        ("/v1/chat/completions", b"[]", 400, ""),
        ("/v1/chat/completions", b"{}", 400, "messages"),
        ("/v1/chat/completions", b'{"messages":[]}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"n":0}', 400, "n"),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2000}', 400, "maximum context length"),
        ("/v1/chat/completions", b'{"model":"other","messages":[{"role":"user","content":"x"}]}', 404, "does not exist"),
        ("/v1/completions", b'{"prompt":[]}', 400, "empty"),
        ("/v1/completions", b'{"prompt":[-1]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt":"x","echo":true}', 400, "echo"),
        ("/v1/completions", b'{"prompt":"x","stop":""}', 400, "stop"),
        ("/v1/completions", b'{"prompt":"x","min_tokens":20}', 400, "min_tokens"),
        ("/v1/nothing", b"{}", 404, ""),
    ],
)
async def test_errors_have_openai_s_shape(path: str, body: bytes, status: int, about: str) -> None:
    async with serving() as server:
        answer = await server.http.post(path, content=body)
        assert answer.status_code == status
        fault = answer.json()["error"]
        assert set(fault) == {"message", "type", "param", "code"}
        assert about in fault["message"]


async def test_a_prompt_longer_than_the_model_takes() -> None:
    async with serving() as server:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
            await server.client.completions.create(model="fake", prompt="long " * 1000)


async def test_the_other_routes() -> None:
    async with serving() as server:
        models = await server.client.models.list()
        assert [model.id for model in models.data] == ["fake"]
        assert (await server.http.get("/health")).status_code == 200
        assert "fake" in (await server.http.get("/version")).json()["version"]
        metrics = (await server.http.get("/metrics")).text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
            assert f'vllm:{name}{{model_name="fake"}} 0.0\n' in metrics


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(stream: bool) -> None:
    async with serving(time_scale=1.0, decode_base_s=0.005) as server:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": stream}
        task = asyncio.ensure_future(server.http.post("/v1/completions", json=body))
        async with asyncio.timeout(5):
            while not server.engine.load().running:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(1):
            while server.engine.load().running:
                await asyncio.sleep(0.005)
        assert server.engine.load().free_tokens == server.engine.load().capacity_tokens


async def test_anthropics_sdk_reads_a_message_streamed_or_not() -> None:
    asked: Any = {"model": "fake", "system": "Be brief.", "messages": HELLO, "max_tokens": 60, "extra_body": {"temperature": 0}}
    async with serving(eos_one_in=0) as server, anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        plain = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        stopped = await client.messages.create(**asked, stop_sequences=[texts[10]])
    assert (plain.stop_reason, plain.usage.output_tokens) == ("max_tokens", 60)
    assert len(texts) > 40
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in plain.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens, streamed.usage.input_tokens) == ("max_tokens", 60, plain.usage.input_tokens)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", texts[10])


async def test_openais_sdk_reads_a_response_streamed_or_not() -> None:
    asked: Any = {"model": "fake", "instructions": "Be brief.", "input": HELLO, "max_output_tokens": 60, "temperature": 0}
    async with serving(eos_one_in=0) as server:
        plain = await server.client.responses.create(**asked)
        told = [event async for event in await server.client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    last = told[-1]
    assert last.type == "response.completed"
    assert (
        last.response.output_text
        == plain.output_text
        == "".join(event.delta for event in told if event.type == "response.output_text.delta")
    )
    assert (last.response.status, last.response.usage) == ("incomplete", plain.usage)
    assert {event.item_id for event in told if event.type == "response.output_text.delta"} == {last.response.output[0].id}
