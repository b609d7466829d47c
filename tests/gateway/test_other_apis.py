"""Anthropic's messages and OpenAI's responses are relayed like chat: moved and resumed at every event, and ended in their own words."""

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from backend.registry.memory import MemoryStore
from gateway.openai import read_body
from gateway.responses import is_relayed
from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.scripted import (
    Exchange,
    answer_event,
    control,
    head_of_attachment,
    moving,
    shown,
    told_message,
    told_response,
)
from tests.gateway.test_reconnection import IDS, come_back, holds, read_events
from tests.gateway.test_relay_resume import RESUME, dies, progress, tells

STREAMS = "/midstream/streams/"


@dataclass(frozen=True)
class Api:
    path: str
    events: Sequence[bytes]
    fields: dict[str, Any]

    async def ask(self, rig: Rig, headers: dict[str, str] | None = None, **more: object) -> httpx.Response:
        return await rig.client.post(self.path, json={"model": "m", "stream": True, **self.fields, **more}, headers=headers)


MESSAGES = Api("/v1/messages", told_message(), {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9})
RESPONSES = Api("/v1/responses", told_response(), {"input": "hello"})
EVERYWHERE = [pytest.param(api, at, id=f"{api.path}-{at}") for api in (MESSAGES, RESPONSES) for at in range(len(api.events))]
apis = pytest.mark.parametrize("api", [MESSAGES, RESPONSES], ids=lambda api: str(api.path))


@apis
async def test_a_stream_is_the_engines_bytes_and_ends_without_an_end_mark(rig: Rig, api: Api) -> None:
    whole = b"".join(api.events)
    backend = await rig.add("a")
    backend.script = tells(*(whole[at : at + 7] for at in range(0, len(whole), 7)))
    response = await api.ask(rig, {"x-request-id": "r1"})
    assert response.content == shown(api.events)
    assert backend.seen[0].headers["x-midstream-request"] == "r1"
    assert await rig.metric('midstream_gateway_requests_total{outcome="ok",tier="normal"} 1.0')
    await rig.quiet()


@pytest.mark.parametrize("end", ["moved", "lost", "cut"])
@pytest.mark.parametrize(("api", "at"), EVERYWHERE)
async def test_moved_at_every_event(rig: Rig, api: Api, at: int, end: str) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def leaves(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*api.events[: at // 2], moving(1, destination), *api.events[at // 2 : at])
        await until(lambda: bool(destination.asked(STREAMS)))
        if end == "cut":
            exchange.cut()
        else:
            await exchange.send(control(kind=end, epoch=1, reason="silent"))
            await exchange.end()

    source.script = leaves
    destination.others[STREAMS] = tells(head_of_attachment(), *api.events)
    assert (await api.ask(rig)).content == shown(api.events)
    assert await rig.metric("midstream_gateway_switches_total 1.0")
    await rig.quiet()


@pytest.mark.parametrize("end", ["cut", "in_event", "end", "released"])
@pytest.mark.parametrize(("api", "at"), [each for each in EVERYWHERE if each.values[1]])
async def test_resumed_at_every_event(rig: Rig, api: Api, at: int, end: str) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = dies(*api.events[:at], end=end)
    for one in (first, second):
        one.others[RESUME] = tells(*api.events)
    assert (await api.ask(rig)).content == shown(api.events)
    (asked,) = [json.loads(seen.body) for one in (first, second) for seen in one.asked(RESUME)]
    tokens = max(int(one.split(b".", 1)[0].removeprefix(b"id: ")) for one in api.events[:at])
    assert asked["tokens"] == [101 + n for n in range(tokens)]
    assert asked["created"] == (1 if api is RESPONSES else None)
    assert asked["http"]["path"] == api.path
    assert base64.b64decode(asked["http"]["body"]) == first.seen[0].body
    await rig.quiet()


@apis
@pytest.mark.parametrize("moved", [False, True])
async def test_a_whole_answer_is_resumed_and_moved(rig: Rig, api: Api, moved: bool) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    rest = [*progress((7, 8, 9)), answer_event(b'{"x":1}')]
    second.others = {RESUME: tells(*rest), STREAMS: tells(*rest)}

    async def moves(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*progress((7, 8)), moving(1, second), control(kind="moved", epoch=1))
        await exchange.end()

    first.script = moves if moved else dies(*progress((7, 8)))
    response = await api.ask(rig, stream=False)
    assert (response.status_code, response.content) == (200, b'{"x":1}')
    await rig.quiet()


@apis
@pytest.mark.parametrize("at", [1, 4])
async def test_a_stream_that_nobody_goes_on_with_ends_with_an_error_of_its_own_api(rig: Rig, api: Api, at: int) -> None:
    (await rig.add("a")).script = dies(*api.events[:at], end="in_event")
    content = (await api.ask(rig)).content
    begun = shown(api.events[:at])
    assert content.startswith(begun + b"event: error\ndata: ")
    last = json.loads(content.removeprefix(begun).split(b"data: ")[1])
    assert last["type"] == "error"
    assert (last["error"]["type"] if api is MESSAGES else last["code"]) == ("api_error" if api is MESSAGES else "instance_lost")
    assert b"[DONE]\n\n" not in content.removeprefix(begun)
    await rig.quiet()


@apis
async def test_an_error_of_the_engines_is_the_end(rig: Rig, api: Api) -> None:
    """It is the request's fault, not the instance's: nobody else is asked."""
    error = b'event: error\ndata: {"type":"error","error":{"type":"x","message":"y"}}\n\n'
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = tells(*api.events[:4], b"id: 2.7;\n" + error)
    assert (await api.ask(rig)).content == shown(api.events[:4]) + error
    assert not second.seen


@apis
async def test_errors_before_the_first_byte(api: Api) -> None:
    async with make_rig(max_body_bytes=300) as rig:
        nobody = await api.ask(rig)
        large = await api.ask(rig, x="y" * 400)
        (await rig.add("a")).script = tells(*api.events)
        unknown = await api.ask(rig, model="other")
    told = [(answer.status_code, answer.json()["error"]["code"]) for answer in (nobody, large, unknown)]
    assert told == [(503, "no_instance"), (413, "body_too_large"), (404, "model_not_found")]
    types = [answer.json()["error"]["type"] for answer in (nobody, large, unknown)]
    if api is MESSAGES:
        assert types == ["overloaded_error", "request_too_large", "not_found_error"]
        assert large.json()["type"] == "error"


@apis
async def test_a_gateway_that_stops_says_so_in_the_words_of_the_api(api: Api) -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*api.events[:3])
        await exchange.wait_left()

    received = b""
    async with asyncio.TaskGroup() as tasks:
        begun = asyncio.Event()

        async def read(url: str) -> None:
            nonlocal received
            async with (
                httpx.AsyncClient(base_url=url, timeout=20) as client,
                client.stream("POST", api.path, json={"model": "m", "stream": True, **api.fields}) as answer,
            ):
                async for part in answer.aiter_raw():
                    received += part
                    begun.set()

        async with make_rig() as rig:
            (await rig.add("a")).script = stalls
            tasks.create_task(read(rig.url))
            await begun.wait()
    assert received.startswith(shown(api.events[:3]) + b"event: error\ndata: ")
    assert b"shutting down" in received


@apis
@pytest.mark.parametrize("at", [0, 1, 4])
async def test_a_client_that_leaves_is_seen_at_the_instance(rig: Rig, api: Api, at: int) -> None:
    waiting, left = asyncio.Event(), asyncio.Event()

    async def stalls(exchange: Exchange) -> None:
        if at:
            await exchange.head()
            await exchange.send(*api.events[:at])
        waiting.set()
        await exchange.wait_left()
        left.set()

    (await rig.add("a")).script = stalls
    async with httpx.AsyncClient(base_url=rig.url, timeout=10) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.post(api.path, json={"model": "m", "stream": True, **api.fields}))
        await waiting.wait()
        asked.cancel()
    async with asyncio.timeout(1.0):
        await left.wait()
    await rig.quiet()


# ---------------------------------------------------------------------- which responses are relayed


@pytest.mark.parametrize(
    ("fields", "relayed"),
    [
        ({}, True),
        ({"background": False, "previous_response_id": None, "tools": None, "store": False}, True),
        ({"store": True, "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}, True),
        ({"background": True}, False),
        ({"background": "true"}, False),
        ({"previous_response_id": "resp_1"}, False),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "web_search_preview"}]}, False),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, False),
        ({"tools": {"type": "function"}}, False),
        ({"tools": ["function"]}, False),
    ],
)
async def test_which_responses_are_relayed(rig: Rig, fields: dict[str, Any], relayed: bool) -> None:
    body = {"model": "m", "input": "x" * 10, "stream": True, **fields}
    assert is_relayed(json.dumps(body).encode()) is relayed
    backend = await rig.add("a")
    backend.script = tells(*RESPONSES.events)
    content = (await rig.client.post("/v1/responses", json=body)).content
    assert ("x-midstream-request" in backend.seen[0].headers) is relayed
    assert (content == shown(RESPONSES.events)) is relayed


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"tools":[}', b'{"background":false,"background":true}'])
def test_what_is_not_understood_is_passed_through(body: bytes) -> None:
    assert not is_relayed(body)


async def test_who_answered_is_remembered_of_a_relayed_response(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script, second.script = tells(*RESPONSES.events), tells(b"{}")
    assert (await RESPONSES.ask(rig)).status_code == 200
    for _ in range(3):
        await rig.client.get("/v1/responses/resp_0123456789abcdef")
    assert len(first.seen) == 4
    assert not second.seen


async def test_a_resumed_response_would_not_know_its_first_log_probabilities(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script, second.others[RESUME] = dies(*RESPONSES.events[:5]), tells(*RESPONSES.events)
    content = (await RESPONSES.ask(rig, include=["message.output_text.logprobs"], top_logprobs=2)).content
    assert b'"instance_lost"' in content
    assert not second.seen
    assert await rig.metric('midstream_gateway_resumes_total{outcome="refused",reason="logprobs"} 1.0')
    first.script = dies(*RESPONSES.events[:2])
    assert (await RESPONSES.ask(rig, include=["message.output_text.logprobs"])).content == shown(RESPONSES.events)


def test_the_fields_of_these_bodies() -> None:
    parts = [{"type": "text", "text": "a" * 8}, {"type": "tool_result", "content": [{"type": "text", "text": "b" * 4}]}]
    message = read_body(json.dumps({"system": "s" * 4, "messages": [{"content": parts}], "max_tokens": 7}).encode())
    assert (message.prompt_tokens, message.max_output_tokens, message.logprobs) == (4, 7, False)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a" * 8}]}, {"type": "function_call_output", "output": "b" * 4}]
    body = {"instructions": "s" * 4, "input": items, "max_output_tokens": 7, "include": ["message.output_text.logprobs"]}
    response = read_body(json.dumps(body).encode())
    assert (response.prompt_tokens, response.max_output_tokens, response.logprobs_at_end) == (4, 7, True)
    assert read_body(b'{"input":"12345678"}').prompt_tokens == 2


# ---------------------------------------------------------------------- read on at another gateway


RESUMABLE = {"x-midstream-resumable": "1", "x-request-id": "r1"}


@pytest.mark.parametrize(("api", "at"), [each for each in EVERYWHERE if each.values[1]])
async def test_read_on_at_another_gateway_after_every_event(api: Api, at: int) -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    knobs = {"resumable_interval_s": 0.01, "view_max_age_s": 0}
    async with make_rig(store, gateway_id="g1", **knobs) as first, make_rig(store, gateway_id="g2", **knobs) as second:
        backend = await first.add("a")
        backend.script, backend.others[RESUME] = holds(*api.events[:at]), tells(*api.events)
        body = {"model": "m", "stream": True, "temperature": 0, **api.fields}
        async with (
            httpx.AsyncClient(base_url=first.url, timeout=10) as client,
            client.stream("POST", api.path, json=body, headers=RESUMABLE) as response,
        ):
            content = await read_events(response, at)
        again = await come_back(second, IDS.findall(content)[-1].decode())
        assert again.status_code == 200
        assert IDS.sub(b"", content + again.content) == shown(api.events)
        (asked,) = backend.asked(RESUME)
        assert json.loads(asked.body)["http"]["path"] == api.path
        if api is RESPONSES:
            assert json.loads(asked.body)["created"] in (1, None)
        await first.quiet()


@apis
async def test_what_cannot_be_read_on_ends_in_the_words_of_its_api(api: Api) -> None:
    """The second gateway's answer is Anthropic's too, though its own route is not."""
    store = MemoryStore(asyncio.get_running_loop().time)
    knobs = {"resumable_interval_s": 0.01, "view_max_age_s": 0}
    async with make_rig(store, gateway_id="g1", **knobs) as first, make_rig(store, gateway_id="g2", **knobs) as second:
        backend = await first.add("a")
        backend.script, backend.others[RESUME] = holds(*api.events[:4]), dies(*api.events[:6])
        body = {"model": "m", "stream": True, "temperature": 0, **api.fields}
        async with (
            httpx.AsyncClient(base_url=first.url, timeout=10) as client,
            client.stream("POST", api.path, json=body, headers=RESUMABLE) as response,
        ):
            content = await read_events(response, 4)
        again = await come_back(second, IDS.findall(content)[-1].decode())
        assert IDS.sub(b"", again.content).startswith(shown(api.events[4:6]) + b"event: error\ndata: ")


async def test_a_message_has_no_seed_that_would_make_it_the_same_again() -> None:
    """vLLM takes none there: what the client has seen and nobody has kept is not computed again."""
    store = MemoryStore(asyncio.get_running_loop().time)
    knobs = {"resumable_max_tokens": 1, "resumable_wait_s": 0.05, "resumable_interval_s": 0.01, "view_max_age_s": 0}
    async with make_rig(store, gateway_id="g1", **knobs) as first, make_rig(store, gateway_id="g2", **knobs) as second:
        backend = await first.add("a")
        backend.script = holds(*MESSAGES.events[:6])
        body = {"model": "m", "stream": True, "seed": 3, **MESSAGES.fields}
        async with (
            httpx.AsyncClient(base_url=first.url, timeout=10) as client,
            client.stream("POST", MESSAGES.path, json=body, headers=RESUMABLE) as got,
        ):
            content = await read_events(got, 6)
        again = await come_back(second, IDS.findall(content)[-1].decode())
        assert (again.status_code, again.json()["error"]["code"]) == (409, "stream_uncertain")
