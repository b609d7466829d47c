"""The wire, against a backend with every fault: each byte that goes in comes out, and what cannot be used is named."""

import asyncio
import json
import socket

import httpx
import pytest

from tests.gateway.conftest import BODY, Rig, impatient_server, make_rig, report, until
from tests.gateway.scripted import SSE, Exchange, chunk, shown, told
from tests.gateway.test_relay import answers, streams

RAW_EVENTS = [chunk("漢"), chunk("🦛"), chunk("data: [DONE]\n\n"), chunk(None, "stop"), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_cut_at_every_byte_is_the_same(rig: Rig, newline: bytes) -> None:
    """One byte a packet: no UTF-8 sequence, line end or field survives in one piece."""
    whole = b"".join(RAW_EVENTS).replace(b"\n", newline)
    (await rig.add("a")).script = streams(*(whole[at : at + 1] for at in range(len(whole))))
    assert (await rig.ask()).content == whole


@pytest.mark.parametrize("at", range(1, 12))
async def test_a_stream_cut_within_a_character_is_the_same(rig: Rig, at: int) -> None:
    whole = b"data: \xf0\x9f\xa6\x9b\xe6\xbc\xa2\n\ndata: [DONE]\n\n"
    (await rig.add("a")).script = streams(whole[:at], whole[at:])
    assert (await rig.ask()).content == whole


async def test_data_without_a_space_and_fields_that_nobody_knows(rig: Rig) -> None:
    whole = b'retry: 5\n\nevent:x\ndata:{"a":1}\ndata:2\n\n: comment\n\ndata:[DONE]\n\n'
    (await rig.add("a")).script = streams(whole)
    assert (await rig.ask()).content == whole


async def test_two_end_marks_are_one_end(rig: Rig) -> None:
    (await rig.add("a")).script = streams(chunk("a"), b"data: [DONE]\n\n", b"data: [DONE]\n\n")
    content = (await rig.ask()).content
    assert content.startswith(chunk("a") + b"data: [DONE]\n\n")
    assert b"error" not in content
    await rig.quiet()


async def test_no_end_mark_is_a_failure_that_is_told(rig: Rig) -> None:
    (await rig.add("a")).script = streams(chunk("a"))
    *_, error, done, nothing = (await rig.ask()).content.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "instance_lost"
    assert (done, nothing) == (b"data: [DONE]", b"")


async def test_an_event_of_a_mebibyte_passes_whole(rig: Rig) -> None:
    big = b"data: " + b"x" * 2**20 + b"\n\n"
    (await rig.add("a")).script = streams(big, big, b"data: [DONE]\n\n")
    assert (await rig.ask()).content == big + big + b"data: [DONE]\n\n"


async def test_a_json_answer_to_a_stream_request_passes_as_json(rig: Rig) -> None:
    (await rig.add("a")).script = answers(200, b'{"choices":[]}')
    response = await rig.ask()
    assert (response.content, response.headers["content-type"]) == (b'{"choices":[]}', "application/json")


async def test_nothing_is_compressed_and_what_is_all_the_same_keeps_its_header(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        assert exchange.headers["accept-encoding"] == "identity"
        await exchange.answer(200, b"\x1f\x8b not really", [("content-type", "application/json"), ("content-encoding", "gzip")])

    (await rig.add("a")).script = script
    async with rig.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": False}) as response:
        assert response.headers["content-encoding"] == "gzip"
        assert b"".join([part async for part in response.aiter_raw()]) == b"\x1f\x8b not really"


@pytest.mark.parametrize(("declared", "code"), [(20, 502), (5, 200)])
async def test_a_wrong_content_length(rig: Rig, declared: int, code: int) -> None:
    """Too long: the answer is cut, and nobody takes it for whole. Too short: the rest belongs to no answer, and spoils no other."""

    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n0123456789" % declared)

    (await rig.add("a")).script = script
    for _ in range(2):
        response = await rig.ask(stream=False)
        assert response.status_code == code
        assert response.content == b"01234" if code == 200 else response.json()["error"]["code"] == "instance_lost"
    await rig.quiet()


async def test_an_answer_that_ends_with_its_connection_is_whole(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{")
        await exchange.raw(b'"a":1}')

    (await rig.add("a")).script = script
    assert (await rig.ask(stream=False)).json() == {"a": 1}


async def test_interim_answers_are_passed_over(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await exchange.answer(200, b"{}")

    (await rig.add("a")).script = script
    response = await rig.ask(stream=False)
    assert (response.status_code, response.content) == (200, b"{}")
    assert "x-a" not in response.headers


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_the_engines(rig: Rig, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, b'{"error":{"message":"busy"}}', [("content-type", "application/json"), ("Retry-After", "7")])

    (await rig.add("a")).script = script
    response = await rig.ask()
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert response.json() == {"error": {"message": "busy"}}


async def test_an_error_page_in_html_passes_as_html(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(400, b"<html>no</html>", [("content-type", "text/html")])

    (await rig.add("a")).script = script
    response = await rig.ask()
    assert (response.status_code, response.content, response.headers["content-type"]) == (400, b"<html>no</html>", "text/html")


async def test_headers_named_by_connection_go_no_further(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\nconnection: X-Hop, close\r\nx-hop: 1\r\nx-end: 2\r\nkeep-alive: timeout=5\r\n")
        await exchange.raw(b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    backend = await rig.add("a")
    backend.script = script
    headers = {"connection": "x-secret, keep-alive", "x-secret": "1", "te": "trailers", "x-mine": "3", "traceparent": "00-ab-cd-01"}
    response = await rig.client.post("/v1/chat/completions", json=BODY, headers=headers)
    assert response.headers["x-end"] == "2"
    assert not {"x-hop", "keep-alive"} & set(response.headers)
    seen = backend.seen[0].headers
    assert (seen["x-mine"], seen["traceparent"]) == ("3", "00-ab-cd-01")
    assert not {"x-secret", "te"} & set(seen)


async def test_the_same_id_on_two_streams_at_once(rig: Rig) -> None:
    go = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await go.wait()
        await exchange.stream(*told())

    backend = await rig.add("a")
    backend.script = script
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(rig.ask(headers={"x-request-id": "twin"})) for _ in range(2)]
        await until(lambda: len(backend.seen) == 2)
        go.set()
    assert sorted(task.result().headers["x-request-id"] == "twin" for task in asked) == [False, True]
    assert all(task.result().content == shown(told()) for task in asked)
    await rig.quiet()


async def test_a_backend_that_closes_idle_connections_sooner_than_the_pool_is_no_failure(rig: Rig) -> None:
    async with impatient_server(rig) as asked:
        for _ in range(10):
            assert (await rig.ask(stream=False)).status_code == 200
        assert len(asked) == 10


async def test_nobody_listens_and_somebody_listens_who_never_answers() -> None:
    with socket.socket() as closed, socket.socket() as mute:
        for each in (closed, mute):
            each.bind(("127.0.0.1", 0))
        mute.listen()
        async with make_rig(attempt_timeout_s=0.2, connect_timeout_s=1.0) as quick:
            good = await quick.add("c", running=9)
            good.script = streams(*told())
            await quick.store.publish(report("a", f"http://127.0.0.1:{closed.getsockname()[1]}"), ttl_s=1000)
            await quick.store.publish(report("b", f"http://127.0.0.1:{mute.getsockname()[1]}", running=1), ttl_s=1000)
            response = await quick.ask()
            assert (response.content, response.headers["x-midstream-instance"]) == (shown(told()), "c")
            await quick.quiet()


async def test_a_body_of_64_mebibytes_passes_unchanged(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = answers(200, b"{}")
    frame = b'{"model":"m","prompt":"","stream":false}'
    body = frame.replace(b'""', b'"' + b"x" * (64 * 2**20 - len(frame)) + b'"')
    assert len(body) == 64 * 2**20
    async with httpx.AsyncClient(base_url=rig.url, timeout=50) as client:
        response = await client.post("/v1/completions", content=body)
        assert response.status_code == 200
        assert backend.seen[0].body == body
        over = await client.post("/v1/completions", content=body + b" ")
        assert (over.status_code, over.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_head_that_never_ends_is_cut_off(rig: Rig) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\n")
        for number in range(10_000):
            await exchange.raw(b"x-%d: %s\r\n" % (number, b"y" * 1000))

    (await rig.add("a")).script = script
    (await rig.add("b", running=1)).script = streams(*told())
    assert (await rig.ask()).content == shown(told())
    await rig.quiet()


async def test_an_answer_with_the_wrong_kind_of_end_is_no_end(rig: Rig) -> None:
    """A chunked stream that is cut without its last chunk, after `[DONE]`: the client has everything, so nothing is wrong."""

    async def script(exchange: Exchange) -> None:
        await exchange.head(200, SSE)
        await exchange.send(*told())
        exchange.cut()

    (await rig.add("a")).script = script
    assert (await rig.ask()).content == shown(told())
    await rig.quiet()
