"""The routes that are passed through: any body, any answer, the instance that holds it, and failures in the API's own words."""

import asyncio
import json

import httpx
import pytest

from gateway.passthrough import GET_PATHS, POST_PATHS
from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.scripted import Exchange, Script

ANTHROPIC = [
    b'event: message_start\ndata: {"type":"message_start"}\n\n',
    b'event: content_block_delta\ndata: {"delta":{"text":"\xf0\x9f\xa6\x9b [DONE]"}}\n\n',
    b'id: 5.0;7\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
]
SPECIAL = ("/v1/responses/{response}/cancel", "/v1/responses/{response}")


def answers(status: int, body: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, body)

    return script


@pytest.mark.parametrize("path", [path for path in POST_PATHS if path not in SPECIAL])
async def test_every_route_passes_bytes_both_ways(rig: Rig, path: str) -> None:
    backend = await rig.add("a")
    backend.script = answers(200, b'{ "data":[\n] }')
    body = b'{ "model":"m", "input" : ["x", 1],\n"unknown": null }'
    response = await rig.client.post(f"{path}?a=%2F", content=body, headers={"content-type": "application/json", "x-own": "1"})
    assert (response.status_code, response.content) == (200, b'{ "data":[\n] }')
    assert response.headers["x-midstream-instance"] == "a"
    (seen,) = backend.seen
    assert (seen.body, seen.target, seen.headers["x-own"]) == (body, f"{path}?a=%2F", "1")
    assert seen.headers["x-request-id"] == response.headers["x-request-id"]
    assert not [name for name in seen.headers if name.startswith("x-midstream")]
    await rig.quiet()


async def test_a_get_is_passed_without_a_body(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = answers(200, b"{}")
    assert "/tokenizer_info" in GET_PATHS
    assert (await rig.client.get("/tokenizer_info")).content == b"{}"
    assert (backend.seen[0].method, backend.seen[0].body) == ("GET", b"")


async def test_a_form_goes_where_its_model_is(rig: Rig) -> None:
    other, speech = await rig.add("a"), await rig.add("b", running=1, models=("whisper",))
    other.script, speech.script = answers(500, b"{}"), answers(200, b'{"text":"hi"}')
    response = await rig.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"RIFF\x00\xff")}, data={"model": "whisper"})
    assert response.json() == {"text": "hi"}
    assert b"RIFF\x00\xff" in speech.seen[0].body
    assert not other.seen


async def test_a_body_that_is_no_json_is_the_engines_to_judge(rig: Rig) -> None:
    (await rig.add("a")).script = answers(400, b'{"error":{"message":"bad json"}}')
    response = await rig.client.post("/tokenize", content=b"{nonsense")
    assert (response.status_code, response.json()) == (400, {"error": {"message": "bad json"}})
    assert (await rig.client.post("/tokenize", json={"model": "nobody"})).json()["error"]["code"] == "model_not_found"


async def test_a_stream_is_the_engines_bytes(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        whole = b"".join(ANTHROPIC)
        await exchange.stream(*(whole[at : at + 3] for at in range(0, len(whole), 3)))

    (await rig.add("a")).script = script
    response = await rig.client.post("/cohere/v2/chat", json={"model": "m", "stream": True})
    assert response.content == b"".join(ANTHROPIC)
    assert response.headers["content-type"].startswith("text/event-stream")
    await rig.quiet()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"type": "error", "code": "instance_lost"}),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_in_its_own_api(rig: Rig, path: str, told: dict[str, object]) -> None:
    async def dies(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(ANTHROPIC[0], ANTHROPIC[1][:-5])
        exchange.cut()

    (await rig.add("a")).script = dies
    (await rig.add("b", running=1)).script = answers(200, b"{}")
    content = (await rig.client.post(path, json={"model": "m", "stream": True})).content
    assert content.startswith(ANTHROPIC[0] + b"event: error\ndata: ")
    last = json.loads(content.removeprefix(ANTHROPIC[0]).split(b"data: ")[1])
    assert last["type"] == told["type"]
    assert last.get("code") == told.get("code")
    assert "[DONE]" not in content.decode()
    await rig.quiet()


async def test_failures_before_the_first_byte_are_retried_elsewhere(rig: Rig) -> None:
    async def dies(exchange: Exchange) -> None:
        exchange.cut()

    (await rig.add("a")).script = dies
    (await rig.add("b", running=1)).script = answers(503, b'{"error":{}}')
    (await rig.add("c", running=2)).script = answers(200, b'{"ok":1}')
    assert (await rig.client.post("/v1/embeddings", json={"model": "m"})).json() == {"ok": 1}
    await rig.quiet()


async def test_stored_responses_are_asked_of_their_holder(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script = answers(404, b'{"error":{"code":404}}')
    second.others = {"/v1/responses/resp_1": answers(200, b'{"id":"resp_1"}'), "/v1/responses": answers(200, b'{"id": "resp_1", "x": 1}')}
    first.others = {"/v1/responses/resp_9": answers(404, b'{"error":{"code":404}}'), "/v1/responses": answers(503, b"{}")}
    assert (await rig.client.post("/v1/responses", json={"model": "m", "input": "x"})).json()["id"] == "resp_1"
    first.seen.clear()
    got = await rig.client.get("/v1/responses/resp_1")
    assert (got.status_code, got.headers["x-midstream-instance"]) == (200, "b")
    assert (await rig.client.post("/v1/responses/resp_1/cancel")).status_code == 200
    follows = await rig.client.post("/v1/responses", json={"model": "m", "input": "y", "previous_response_id": "resp_1"})
    assert follows.headers["x-midstream-instance"] == "b"
    assert not first.seen


async def test_a_stored_response_of_which_nobody_knows_is_looked_for(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script = answers(404, b'{"error":{"code":404}}')
    second.script = answers(200, b'{"id":"resp_2"}')
    assert (await rig.client.get("/v1/responses/resp_2")).json() == {"id": "resp_2"}
    second.script = first.script
    missing = await rig.client.get("/v1/responses/resp_3")
    assert (missing.status_code, missing.json()) == (404, {"error": {"code": 404}})
    await rig.quiet()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_is_seen_at_the_instance(rig: Rig, path: str, begun: bool) -> None:
    waiting, left = asyncio.Event(), asyncio.Event()

    async def stalls(exchange: Exchange) -> None:
        if begun:
            await exchange.head()
            await exchange.send(ANTHROPIC[0])
        waiting.set()
        await exchange.wait_left()
        left.set()

    (await rig.add("a")).script = stalls
    async with httpx.AsyncClient(base_url=rig.url, timeout=10) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.post(path, json={"model": "m", "stream": begun}))
        await waiting.wait()
        asked.cancel()
    async with asyncio.timeout(1.0):
        await left.wait()
    await rig.quiet()


async def test_an_idle_stream_is_kept_open_and_a_silent_one_ended() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(ANTHROPIC[0], ANTHROPIC[1][:9])
        await exchange.wait_left()

    async with make_rig(keepalive_interval_s=0.02, idle_timeout_s=0.3) as chatty:
        (await chatty.add("a")).script = stalls
        content = (await chatty.client.post("/v1/messages", json={"model": "m", "stream": True})).content
        assert content.startswith(ANTHROPIC[0] + b": keep-alive\n\n")
        assert content.endswith(b"\n\n")
        assert b"event: error\n" in content
        await chatty.quiet()


async def test_aliases() -> None:
    async with make_rig(aliases={"gpt-4o": "m", "gone": "nobody"}) as aliased:
        backend = await aliased.add("a")
        backend.script = answers(200, b"{}")
        listed = (await aliased.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [("gpt-4o", "m"), ("m", "m")]
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            body = b'{"x":{"model":"gpt-4o"}, "model" : "gpt-4o"}'
            assert (await aliased.client.post(path, content=body)).status_code == 200
            assert backend.seen[-1].body == b'{"x":{"model":"gpt-4o"}, "model" : "m"}'
        form = await aliased.client.post("/v1/audio/transcriptions", files={"file": ("a", b"gpt-4o")}, data={"model": "gpt-4o"})
        assert form.status_code == 200
        assert backend.seen[-1].body.count(b"gpt-4o") == 1
        assert (await aliased.client.post("/v1/embeddings", json={"model": "gone"})).status_code == 404


async def test_limits_hold_here_too() -> None:
    async with make_rig(max_body_bytes=100) as small:
        backend = await small.add("a")
        big = await small.client.post("/v1/embeddings", json={"input": "x" * 200})
        assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
        await until(lambda: not backend.seen)
