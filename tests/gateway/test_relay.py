"""The streaming path on one instance, and retries before the first byte."""

import asyncio
import json

import httpx
import pytest

from backend.registry.instance import InstanceState
from tests.gateway.conftest import BODY, Rig, make_rig, report, until, until_still
from tests.gateway.scripted import Exchange, Script, answer_event, chunk, event, shown, told

ERROR = b'{"error":{"message":"bad","type":"invalid_request_error","param":"n","code":400}}'


def streams(*parts: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.stream(*parts)

    return script


def answers(status: int, body: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, body)

    return script


async def test_stream_is_the_engines_bytes(rig: Rig) -> None:
    backend = await rig.add("a")
    events = told()
    backend.script = streams(*events)
    response = await rig.ask(headers={"x-request-id": "mine-1", "priority": "high"})
    assert response.status_code == 200
    assert response.content == shown(events)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-midstream-instance"] == "a"
    assert response.headers["x-midstream-tier"] == "high"
    await rig.quiet()
    assert await rig.metric('midstream_gateway_requests_total{outcome="ok",tier="high"} 1.0')


async def test_upstream_gets_the_bodys_bytes_and_our_headers(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = streams(*told())
    body = b'{ "model":"m", "messages":[], "stream" : true, "unknown": [1, 2],\n "x": "\xc3\xa9" }'
    headers = {"content-type": "application/json", "authorization": "Bearer k", "x-midstream-epoch": "9", "cookie": "a=b"}
    response = await rig.client.post("/v1/chat/completions?v=1%2F2", content=body, headers=headers)
    assert response.status_code == 200
    (seen,) = backend.seen
    assert seen.body == body
    assert seen.target == "/v1/chat/completions?v=1%2F2"
    request = response.headers["x-request-id"]
    assert request.startswith("ms-")
    assert seen.headers["x-midstream-request"] == seen.headers["x-request-id"] == request
    assert seen.headers["x-midstream-epoch"] == "0"
    assert seen.headers["x-midstream-tier"] == "normal"
    assert seen.headers["authorization"] == "Bearer k"
    assert "priority" not in seen.headers


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_stream_in_small_packets(rig: Rig, size: int) -> None:
    backend = await rig.add("a")
    events = told()
    whole = b"".join(events)
    backend.script = streams(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert (await rig.ask()).content == shown(events)


async def test_crlf_events_keep_their_line_ends(rig: Rig) -> None:
    backend = await rig.add("a")
    parts = [b"id: 1.0;5\r\ndata: {}\r\n\r\n", b"id: 2.0;6\r\ndata:{}\r\ndata: x\r\n\r", b"\nid: 2.1;\r\ndata: [DONE]\r\n\r\n"]
    backend.script = streams(*parts)
    assert (await rig.ask()).content == b"data: {}\r\n\r\ndata:{}\r\ndata: x\r\n\r\ndata: [DONE]\r\n\r\n"


async def test_request_id_in_use_is_replaced(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = streams(*told())
    first = await rig.ask(headers={"x-request-id": "same"})
    second = await rig.ask(headers={"x-request-id": "same"})
    third = await rig.ask(headers={"x-request-id": "not sane"})
    assert first.headers["x-request-id"] == "same"
    assert second.headers["x-request-id"].startswith("ms-")
    assert third.headers["x-request-id"].startswith("ms-")


async def test_unknown_priority_is_normal_and_says_so(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = streams(*told())
    response = await rig.ask(headers={"priority": "u=1, i"})
    assert response.headers["x-midstream-tier"] == "normal"
    assert "u=1, i" in response.headers["x-midstream-tier-note"]


async def test_plain_answer_travels_as_progress(rig: Rig) -> None:
    backend = await rig.add("a")
    answer = json.dumps({"choices": [{"message": {"content": "🦛 [DONE]"}}]}).encode()
    backend.script = streams(event(1, 0, (7,), b"\n"), event(3, 0, (8, 9), b"\n"), b": comment\n\n", answer_event(answer))
    response = await rig.ask(stream=False)
    assert response.content == answer
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(answer))
    await rig.quiet()


async def test_bad_request_passes_verbatim_and_is_not_retried(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script = answers(400, ERROR)
    response = await rig.ask()
    assert (response.status_code, response.content) == (400, ERROR)
    assert response.headers["content-type"] == "application/json"
    assert not second.seen
    await rig.quiet()


async def reset_before_head(exchange: Exchange) -> None:
    exchange.cut()


async def reset_after_head(exchange: Exchange) -> None:
    await exchange.head()
    exchange.cut()


async def end_without_events(exchange: Exchange) -> None:
    await exchange.stream()


async def reset_in_first_event(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(told()[0][:-10])
    exchange.cut()


async def nonsense(exchange: Exchange) -> None:
    await exchange.raw(b"SSH-2.0-OpenSSH\r\n\r\n")


async def unavailable(exchange: Exchange) -> None:
    await exchange.answer(503, ERROR)


FIRST_BYTE_FAULTS = [reset_before_head, reset_after_head, end_without_events, reset_in_first_event, nonsense, unavailable]


@pytest.mark.parametrize("fault", FIRST_BYTE_FAULTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_fault_before_first_byte_is_retried_unseen(rig: Rig, fault: Script, stream: bool) -> None:
    bad, good = await rig.add("a"), await rig.add("b", running=1)
    bad.script = fault
    good.script = streams(*told()) if stream else streams(event(1, 0, (1,), b"\n"), answer_event(b"{}"))
    response = await rig.ask(stream=stream)
    assert response.status_code == 200
    assert response.content == (shown(told()) if stream else b"{}")
    assert response.headers["x-midstream-instance"] == "b"
    assert len(bad.seen) == 1
    await rig.quiet()


async def test_instance_that_is_gone_is_avoided_afterwards(rig: Rig) -> None:
    gone, good = await rig.add("a"), await rig.add("b", running=1)
    await rig.store.withdraw(report("a").instance)
    await rig.store.publish(report("gone", "http://127.0.0.1:9"), 1000)
    good.script = streams(*told())
    for _ in range(3):
        assert (await rig.ask()).status_code == 200
    assert await rig.metric('midstream_gateway_retries_total{reason="instance_unreachable"} 1.0')
    assert not gone.seen


async def test_silent_instance_is_given_up(rig: Rig) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.wait_left()

    async with make_rig(attempt_timeout_s=0.2) as quick:
        bad, good = await quick.add("a"), await quick.add("b", running=1)
        bad.script = silent
        good.script = streams(*told())
        assert (await quick.ask()).content == shown(told())
        await quick.quiet()


async def test_first_byte_deadline_over_all_attempts() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.wait_left()

    async with make_rig(first_byte_timeout_s=0.2) as quick:
        (await quick.add("a")).script = silent
        response = await quick.ask()
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "first_byte_timeout"
        await quick.quiet()


async def test_all_instances_fail(rig: Rig) -> None:
    backends = [await rig.add("a"), await rig.add("b")]
    for backend in backends:
        backend.script = unavailable
    response = await rig.ask()
    assert (response.status_code, response.content) == (503, ERROR)
    assert [len(backend.seen) for backend in backends] == [1, 1]
    for backend in backends:
        backend.script = reset_before_head
    response = await rig.ask()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "instance_lost"
    await rig.quiet()


@pytest.mark.parametrize("clean", [True, False])
async def test_death_after_first_byte_ends_with_error_and_done(rig: Rig, clean: bool) -> None:
    events = told()

    async def dies(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*events[:4], events[4][:-3])
        if clean:
            await exchange.end()
        else:
            exchange.cut()

    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script = dies  # and the second cannot resume
    content = (await rig.ask()).content
    assert content.startswith(shown(events[:4]))
    tail = content.removeprefix(shown(events[:4]))
    *_, error, done, nothing = tail.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "instance_lost"
    assert [seen.target for seen in second.seen] == ["/midstream/resume"]
    await rig.quiet()


async def test_death_of_plain_request_with_progress_is_502(rig: Rig) -> None:
    async def dies(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(event(1, 0, (7,), b"\n"))
        exchange.cut()

    (await rig.add("a")).script = dies
    response = await rig.ask(stream=False)
    assert response.status_code == 502
    assert response.json()["error"]["type"] == "api_error"
    await rig.quiet()


async def test_silence_in_mid_answer_counts_as_death() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(told()[0])
        await exchange.wait_left()

    async with make_rig(idle_timeout_s=0.1) as quick:
        (await quick.add("a")).script = stalls
        content = (await quick.ask()).content
        assert content.startswith(chunk(""))
        assert content.endswith(b"data: [DONE]\n\n")
        assert b"instance_lost" in content
        await quick.quiet()


async def test_idle_stream_gets_comments_between_events() -> None:
    more = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.head()
        events = told()
        await exchange.send(events[0], events[1][:10])
        await more.wait()
        await exchange.send(events[1][10:], *events[2:])
        await exchange.end()

    async with make_rig(keepalive_interval_s=0.02) as chatty:
        (await chatty.add("a")).script = slow
        async with chatty.reading() as response:
            content = b""
            async for part in response.aiter_raw():
                content += part
                if content.count(b": keep-alive\n\n") >= 2:
                    more.set()
        assert content.replace(b": keep-alive\n\n", b"") == shown(told())


async def test_slow_client_holds_the_upstream_back(rig: Rig) -> None:
    sent = 0
    big = event(1, 0, (1,), b"data: " + b"x" * 60_000 + b"\n\n")

    async def firehose(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.head()
        for _ in range(1000):
            await exchange.send(big)
            sent += len(big)
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    backend = await rig.add("a")
    backend.script = firehose
    async with rig.reading() as response:
        parts = response.aiter_raw()
        await anext(parts)
        await until_still(lambda: sent)
        assert sent < 30_000_000
        content = sum([len(part) async for part in parts])
    assert sent == 1000 * len(big)
    assert content > 59_000_000


async def test_body_limits_and_malformed_bodies() -> None:
    async with make_rig(max_body_bytes=1000) as small:
        backend = await small.add("a")
        backend.script = streams(*told())
        big = await small.ask(padding="x" * 2000)
        assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")

        async def pieces() -> object:
            for _ in range(30):
                yield b"x" * 100

        chunked = await small.client.post("/v1/completions", content=pieces())  # type: ignore[arg-type]
        assert chunked.status_code == 413
        for body in (b"", b"{", b"[1]", b"\xff", b"nul", b"[" * 900):
            response = await small.client.post("/v1/chat/completions", content=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert not backend.seen
        await small.quiet()


async def test_unknown_model_and_no_instance(rig: Rig) -> None:
    empty = await rig.ask()
    assert empty.status_code == 503
    assert empty.headers["retry-after"] == "1"
    await rig.add("a", state=InstanceState.DRAINING)
    unknown = await rig.ask(model="other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    draining = await rig.ask()
    assert draining.status_code == 503


async def test_completions_and_absent_model(rig: Rig) -> None:
    backend = await rig.add("a")
    backend.script = streams(*told())
    response = await rig.client.post("/v1/completions", json={"prompt": [1, 2, 3], "stream": True})
    assert response.content == shown(told())
    assert backend.seen[0].target == "/v1/completions"


async def test_answer_without_llumlet_passes(rig: Rig) -> None:
    """A plain OpenAI server: no cursors, and a JSON answer for a plain request."""
    backend = await rig.add("a")
    backend.script = streams(b"data: {}\n\n", b"data: [DONE]\n\n")
    assert (await rig.ask()).content == b"data: {}\n\ndata: [DONE]\n\n"
    backend.script = answers(200, b'{"choices":[]}')
    response = await rig.ask(stream=False)
    assert (response.status_code, response.content) == (200, b'{"choices":[]}')


async def test_a_hundred_streams_at_once(rig: Rig) -> None:
    backends = [await rig.add(name) for name in ("a", "b", "c", "d")]
    released = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.head()
        events = told()
        await exchange.send(*events[:3])
        await released.wait()
        await exchange.send(*events[3:])
        await exchange.end()

    for backend in backends:
        backend.script = waits
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=rig.url, timeout=20, limits=limits) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.post("/v1/chat/completions", json=BODY)) for _ in range(100)]
        await until(lambda: sum(backend.open for backend in backends) == 100, within_s=15)
        assert [backend.open for backend in backends] == [25, 25, 25, 25]
        released.set()
    assert all(task.result().content == shown(told()) for task in asked)
    await rig.quiet()
