"""The OpenAI SDK as the client, sync and async, against a request that moves."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.gateway.conftest import Rig
from tests.gateway.scripted import WORDS, answer_event, control, event, told
from tests.gateway.test_relay import streams
from tests.gateway.test_relay_moves import EVENTS, STREAMS, attached, leaves

PLAIN = (
    b'{"id":"chatcmpl-r","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"\xf0\x9f\xa6\x9b [DONE]"},"finish_reason":"stop"}]}'
)


async def test_async_stream_that_moves(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(EVENTS[:5], destination)
    destination.others[STREAMS] = attached(*EVENTS)
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        text = "".join([part.choices[0].delta.content or "" async for part in stream])
    assert text == "".join(WORDS)
    await rig.quiet()


async def test_sync_stream_that_moves(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(EVENTS[:5], destination)
    destination.others[STREAMS] = attached(*EVENTS)

    def read() -> Iterator[str]:
        with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0) as client:
            for part in client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True):
                yield part.choices[0].delta.content or ""

    assert "".join(await asyncio.to_thread(lambda: list(read()))) == "".join(WORDS)


async def test_plain_answer_and_models(rig: Rig) -> None:
    (await rig.add("a")).script = streams(event(1, 0, (1,), b"\n"), answer_event(PLAIN))
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "🦛 [DONE]"
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nope", messages=[])
        assert caught.value.code == "model_not_found"


async def test_failure_in_mid_stream_is_an_exception_not_a_short_answer(rig: Rig) -> None:
    (await rig.add("a")).script = streams(*told()[:4], control(kind="lost", reason="x"))
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="lost the request"):
            async for part in stream:
                text += part.choices[0].delta.content or ""
    assert text == "".join(WORDS[:3])
