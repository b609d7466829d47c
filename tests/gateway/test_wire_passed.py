"""The wire again, on the routes that are passed through and on Anthropic's: every fault, every way to cut bytes, every way to leave."""

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.passthrough import GET_PATHS, POST_PATHS
from gateway.routes import RELAYED_PATHS
from tests.gateway.conftest import Rig, impatient_server, make_rig, report, until, until_still
from tests.gateway.scripted import Exchange, Script, named, shown, told_message
from tests.gateway.test_relay import FIRST_BYTE_FAULTS, answers, streams
from tests.gateway.test_relay_leaving import until_metric

STREAMED = "/cohere/v2/chat"
WHOLE = "/v1/embeddings"
MESSAGES = "/v1/messages"
RAW_EVENTS = [named("content-delta", text=text) for text in ("漢", "🦛", "data: [DONE]\n\n")] + [b"data: [DONE]\n\n"]
MESSAGE = [named("message_start"), named("content_block_delta", text="漢 data: [DONE]\n\n"), named("message_stop")]
BODY = {"model": "m", "stream": True, "messages": [], "input": "x"}
paths = pytest.mark.parametrize("path", [STREAMED, MESSAGES])
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}


async def ask(rig: Rig, path: str, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    return await rig.client.post(path, json={**BODY, **fields}, headers=headers)


# ---------------------------------------------------------------------- bytes


@paths
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_cut_at_every_byte_is_the_same(rig: Rig, path: str, newline: bytes) -> None:
    whole = b"".join(MESSAGE if path == MESSAGES else RAW_EVENTS).replace(b"\n", newline)
    (await rig.add("a")).script = streams(*(whole[at : at + 1] for at in range(len(whole))))
    assert (await ask(rig, path)).content == whole
    await rig.quiet()


@paths
async def test_a_mebibyte_at_once_fields_that_nobody_knows_and_no_space(rig: Rig, path: str) -> None:
    odd = b'retry: 5\n\nevent:x\ndata:{"a":1}\ndata:2\n\n: comment\n\n'
    whole = odd + b"data: " + b"x" * 2**20 + b"\n\n" + b"event:message_stop\ndata:{}\n\n"
    (await rig.add("a")).script = streams(whole)
    assert (await ask(rig, path)).content == whole


@pytest.mark.parametrize("ends", [0, 1, 2])
async def test_end_marks_mean_nothing_where_the_api_has_none(rig: Rig, ends: int) -> None:
    """What is passed through ends where the instance ends it."""
    whole = b"".join(RAW_EVENTS[:3]) + b"data: [DONE]\n\n" * ends
    (await rig.add("a")).script = streams(whole)
    assert (await ask(rig, STREAMED)).content == whole
    assert await rig.metric('midstream_gateway_requests_total{outcome="ok",tier="normal"} 1.0')


async def test_a_message_without_its_stop_is_a_failure_that_is_told(rig: Rig) -> None:
    begun = b"".join(MESSAGE[:2]) + b"data: [DONE]\n\n"
    (await rig.add("a")).script = streams(begun)
    content = (await ask(rig, MESSAGES)).content
    assert content.startswith(begun + b"event: error\ndata: ")
    assert json.loads(content.removeprefix(begun).split(b"data: ")[1])["error"]["code"] == "instance_lost"


@paths
async def test_a_json_answer_to_a_stream_request_passes_as_json(rig: Rig, path: str) -> None:
    (await rig.add("a")).script = answers(200, b'{"x":[]}')
    response = await ask(rig, path)
    assert (response.content, response.headers["content-type"]) == (b'{"x":[]}', "application/json")


@pytest.mark.parametrize("path", [STREAMED, MESSAGES, WHOLE])
async def test_nothing_is_compressed_and_what_is_all_the_same_keeps_its_header(rig: Rig, path: str) -> None:
    async def script(exchange: Exchange) -> None:
        assert exchange.headers["accept-encoding"] == "identity"
        await exchange.answer(200, b"\x1f\x8b not really", [("content-type", "application/json"), ("content-encoding", "gzip")])

    (await rig.add("a")).script = script
    async with rig.client.stream("POST", path, json={**BODY, "stream": False}) as response:
        assert response.headers["content-encoding"] == "gzip"
        assert b"".join([part async for part in response.aiter_raw()]) == b"\x1f\x8b not really"


@pytest.mark.parametrize(("declared", "code"), [(20, 502), (5, 200)])
async def test_a_wrong_content_length(rig: Rig, declared: int, code: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n0123456789" % declared)

    (await rig.add("a")).script = script
    for _ in range(2):
        response = await ask(rig, WHOLE)
        assert response.status_code == code
        assert response.content == b"01234" if code == 200 else response.json()["error"]["code"] == "instance_lost"
    await rig.quiet()


@pytest.mark.parametrize("path", [STREAMED, MESSAGES, WHOLE])
@pytest.mark.parametrize("status", [429, 503])
async def test_refusals_are_the_engines_with_their_headers(rig: Rig, path: str, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, b"<html>busy</html>", [("content-type", "text/html"), ("Retry-After", "7")])

    (await rig.add("a")).script = script
    response = await ask(rig, path)
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert (response.content, response.headers["content-type"]) == (b"<html>busy</html>", "text/html")


# ---------------------------------------------------------------------- headers


@pytest.mark.parametrize("path", [*RELAYED_PATHS, "/v1/responses", STREAMED, WHOLE])
async def test_traces_go_on_and_headers_named_by_connection_do_not(rig: Rig, path: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\nconnection: X-Hop, close\r\nx-hop: 1\r\nx-end: 2\r\nkeep-alive: timeout=5\r\n")
        await exchange.raw(b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    backend = await rig.add("a")
    backend.script = script
    response = await ask(rig, path, {"connection": "x-secret, keep-alive", "x-secret": "1", "te": "trailers", **TRACE})
    assert response.headers["x-end"] == "2"
    assert not {"x-hop", "keep-alive"} & set(response.headers)
    seen = backend.seen[0].headers
    assert {name: seen[name] for name in TRACE} == TRACE
    assert not {"x-secret", "te"} & set(seen)


async def test_a_resumed_request_is_in_the_same_trace(rig: Rig) -> None:
    events = told_message()

    async def dies(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*events[:4])
        exchange.cut()

    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script, second.others["/midstream/resume"] = dies, streams(*events)
    assert (await ask(rig, MESSAGES, TRACE)).content == shown(events)
    headers = dict(json.loads(second.seen[0].body)["http"]["headers"])
    assert {name: headers[name] for name in TRACE} == TRACE


@pytest.mark.parametrize("path", [STREAMED, MESSAGES, WHOLE])
async def test_the_same_id_on_two_requests_at_once(rig: Rig, path: str) -> None:
    go = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await go.wait()
        await exchange.answer(200, b"{}")

    backend = await rig.add("a")
    backend.script = script
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(rig, path, {"x-request-id": "twin"})) for _ in range(2)]
        await until(lambda: len(backend.seen) == 2)
        go.set()
    assert sorted(task.result().headers["x-request-id"] == "twin" for task in asked) == [False, True]
    assert len({exchange.headers["x-request-id"] for exchange in backend.seen}) == 2
    await rig.quiet()


# ---------------------------------------------------------------------- connections


@paths
@pytest.mark.parametrize("fault", FIRST_BYTE_FAULTS)
async def test_a_fault_before_the_first_byte_is_retried_unseen(rig: Rig, path: str, fault: Script) -> None:
    bad, good = await rig.add("a"), await rig.add("b", running=1)
    bad.script, good.script = fault, streams(*MESSAGE)
    response = await ask(rig, path)
    assert (response.status_code, response.content) == (200, b"".join(MESSAGE))
    assert (len(bad.seen), response.headers["x-midstream-instance"]) == (1, "b")
    await rig.quiet()


@paths
async def test_nobody_listens_and_somebody_listens_who_never_answers(path: str) -> None:
    with socket.socket() as closed, socket.socket() as mute:
        for each in (closed, mute):
            each.bind(("127.0.0.1", 0))
        mute.listen()
        async with make_rig(attempt_timeout_s=0.2, connect_timeout_s=1.0) as quick:
            (await quick.add("c", running=9)).script = streams(*MESSAGE)
            await quick.store.publish(report("a", f"http://127.0.0.1:{closed.getsockname()[1]}"), ttl_s=1000)
            await quick.store.publish(report("b", f"http://127.0.0.1:{mute.getsockname()[1]}", running=1), ttl_s=1000)
            response = await ask(quick, path)
            assert (response.content, response.headers["x-midstream-instance"]) == (b"".join(MESSAGE), "c")
            await quick.quiet()


async def test_a_reset_within_a_chunk_ends_with_an_error(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(RAW_EVENTS[0])
        await exchange.raw(b"100\r\ndata: hal")
        exchange.cut()

    (await rig.add("a")).script = script
    content = (await ask(rig, STREAMED)).content
    assert content.startswith(RAW_EVENTS[0] + b"data: ")
    assert content.endswith(b"data: [DONE]\n\n")
    assert b'"instance_lost"' in content
    assert b"hal" not in content.removeprefix(RAW_EVENTS[0])
    await rig.quiet()


async def test_a_backend_that_closes_idle_connections_sooner_than_the_pool_is_no_failure(rig: Rig) -> None:
    async with impatient_server(rig) as asked:
        for _ in range(10):
            assert (await ask(rig, WHOLE)).status_code == 200
        assert len(asked) == 10


@paths
async def test_a_slow_reader_holds_a_fast_instance_back(rig: Rig, path: str) -> None:
    sent = 0
    big = b"data: " + b"x" * 60_000 + b"\n\n"

    async def firehose(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.head()
        for _ in range(600):
            await exchange.send(big)
            sent += len(big)
        await exchange.send(MESSAGE[-1])
        await exchange.end()

    (await rig.add("a")).script = firehose
    async with httpx.AsyncClient(base_url=rig.url, timeout=20) as client, client.stream("POST", path, json=BODY) as response:
        parts = response.aiter_raw()
        await anext(parts)
        await until_still(lambda: sent)
        assert sent < 20_000_000
        content = sum([len(part) async for part in parts])
    assert sent == 600 * len(big)
    assert content > 597 * len(big)


# ---------------------------------------------------------------------- leaving


@pytest.mark.parametrize(
    ("method", "path"),
    [*(("POST", path) for path in (*RELAYED_PATHS, "/v1/responses", *POST_PATHS)), *(("GET", path) for path in GET_PATHS)],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_leaving_on_every_route(rig: Rig, method: str, path: str, begun: bool) -> None:
    waiting, left = asyncio.Event(), asyncio.Event()

    async def stalls(exchange: Exchange) -> None:
        if begun:
            await exchange.head()
            await exchange.send(b"data: {}\n\n")
        waiting.set()
        await exchange.wait_left()
        left.set()

    (await rig.add("a")).script = stalls
    body = {**BODY, "stream": begun} if method == "POST" else None
    async with httpx.AsyncClient(base_url=rig.url, timeout=10) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.request(method, path.replace("{response}", "resp_1"), json=body))
        await waiting.wait()
        asked.cancel()
    async with asyncio.timeout(1.0):
        await left.wait()
    await rig.quiet()
    await until_metric(rig, 'midstream_gateway_requests_total{outcome="client_left",tier="normal"} 1.0')


async def leave_when(rig: Rig, path: str, sent: bytes, moment: Callable[[], bool]) -> None:
    """Send that much, wait for the moment, close."""
    url = urlsplit(rig.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port, limit=1024)
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\n" % path.encode() + sent)
    await writer.drain()
    await until(moment)
    writer.transport.abort()
    await until_metric(rig, 'midstream_gateway_requests_total{outcome="client_left",tier="normal"} 1.0')
    await rig.quiet()


@pytest.mark.parametrize("path", [STREAMED, WHOLE, MESSAGES, "/v1/responses"])
async def test_leaving_while_the_body_is_sent(rig: Rig, path: str) -> None:
    backend = await rig.add("a")
    await leave_when(rig, path, b"content-length: 1000\r\n\r\n{", lambda: True)
    assert not backend.seen


@paths
async def test_leaving_without_reading(rig: Rig, path: str) -> None:
    sent = 0

    async def firehose(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.head()
        while True:
            await exchange.send(b"data: " + b"x" * 60_000 + b"\n\n")
            sent += 1

    (await rig.add("a")).script = firehose
    body = json.dumps(BODY).encode()
    seen: list[int] = []

    def is_stuck() -> bool:
        seen.append(sent)
        return sent > 10 and seen[-100:] == [sent] * 100

    await leave_when(rig, path, b"content-length: %d\r\n\r\n%s" % (len(body), body), is_stuck)


@pytest.mark.parametrize("path", [STREAMED, WHOLE, MESSAGES, "/v1/responses"])
async def test_leaving_while_others_are_before_it_in_line(path: str) -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(MESSAGE[0])
        await go.wait()
        await exchange.send(*MESSAGE[1:])
        await exchange.end()

    async with make_rig() as rig:
        backend = await rig.add("a")
        backend.script = slow
        await rig.store.publish(replace(report("a", backend.url), max_batch=1), ttl_s=1000)
        async with httpx.AsyncClient(base_url=rig.url, timeout=10) as client, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(ask(rig, MESSAGES))
            await until(lambda: bool(backend.seen))
            asked = tasks.create_task(client.post(path, json=BODY))
            await until(lambda: in_line(rig))
            asked.cancel()
            await until(lambda: nobody_in_line(rig), within_s=1.0)
            go.set()
        assert first.result().status_code == 200
        assert len(backend.seen) == 1
        await rig.quiet()


async def in_line(rig: Rig) -> bool:
    return bool((await rig.store.line.look("m", 100)).standings)


async def nobody_in_line(rig: Rig) -> bool:
    return not await in_line(rig)
