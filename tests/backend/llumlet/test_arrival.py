"""Requests that come from elsewhere, over a real server: admitted and fed directly, read over HTTP."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from backend.llumlet.wire import lost_event, moved_event, moving_event
from migration.errors import Refused
from migration.leg import InstanceId, Leg, RequestId
from migration.messages import HttpRequest, Prepare, TokenStep
from migration.plan import MigrationMode
from tests.backend.llumlet.live import CHAT_PLAIN, CHAT_STREAM, Backend, Reader, running_backend, wait_until
from tests.backend.llumlet.scripted_engine import CHAT, LAYOUT, event

LEG = Leg(RequestId("R"), 1)
DONE = b"data: [DONE]\n\n"


def prepare(*tokens: int, body: bytes = CHAT_STREAM, created: int | None = 77, leg: Leg = LEG) -> Prepare:
    ours = (("x-midstream-request", leg.request), ("x-midstream-rank", "2"))
    headers = (("content-type", "application/json"), *ours, ("content-length", str(len(body))))
    return Prepare(
        leg=leg,
        source=InstanceId("i0"),
        mode=MigrationMode.LIVE,
        http=HttpRequest(path=f"{CHAT}?a=b", headers=headers, body=body),
        created=created,
        steps=tuple(TokenStep(token) for token in tokens),
        prompt_tokens=5,
        room_tokens=0,
        layout=LAYOUT,
        channel=None,
        tier="batch",
    )


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with running_backend() as backend:
        yield backend


async def head(reader: Reader) -> bytes:
    """Take the head event, which comes first."""
    first, ending, _ = (await reader.until(b"\n\n")).partition(b"\n\n")
    fields = json.loads(first.removeprefix(b"event: midstream\ndata: "))
    assert (fields["kind"], fields["status"]) == ("head", 200)
    assert ["content-type", "text/event-stream; charset=utf-8"] in fields["headers"]
    return first + ending


async def test_an_arrived_request_is_replayed_and_goes_on(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7, 8))
    flight = backend.engine.flights[LEG]
    assert (flight.tier, flight.rank, flight.http.path) == ("batch", 2, f"{CHAT}?a=b")
    async with backend.attach("R", 1) as reader:
        assert reader.headers["content-type"].startswith("text/event-stream")
        start = await head(reader)
        await reader.until(event("<8>", 77))
        assert (await backend.requests())[0]["state"] == "arriving"
        backend.arrivals.extend(LEG, [TokenStep(9)])
        backend.arrivals.finish(LEG)
        await reader.until(event("<9>", 77))
        assert (await backend.requests())[0]["state"] == "decoding"
        backend.engine.feed(10, None)
        text = await reader.rest()
    tokens = b"".join(b"id: %d.0;%d\n" % (n, t) + event(f"<{t}>", 77) for n, t in enumerate((7, 8, 9, 10), start=1))
    assert text == start + b"id: 0.0;\n" + event("", 77) + tokens + b"id: 4.1;\n" + DONE
    assert backend.engine.closed == [LEG]
    await wait_until(lambda: not len(backend.arrivals))


async def test_the_stream_waits_for_a_late_reader_even_when_it_is_over(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    backend.engine.feed(8, None)
    await wait_until(lambda: backend.engine.closed)
    async with backend.attach("R", 1) as reader:
        assert (await reader.rest()).endswith(b"id: 2.0;8\n" + event("<8>", 77) + b"id: 2.1;\n" + DONE)
    await wait_until(lambda: not len(backend.arrivals))


async def test_nobody_attaches_to_an_owner_in_time() -> None:
    async with running_backend(attach_timeout_s=0.05) as backend:
        await backend.arrivals.admit(prepare(7))
        backend.arrivals.finish(LEG)
        await wait_until(lambda: backend.engine.closed == [LEG])
        assert backend.engine.cancelled.is_set()
        await wait_until(lambda: not len(backend.arrivals))
        async with backend.attach("R", 1) as reader:
            assert (reader.status, json.loads(await reader.rest())["error"]["code"]) == (404, "unknown_leg")


async def test_a_stream_that_is_over_and_never_read_is_forgotten() -> None:
    async with running_backend(attach_timeout_s=0.05) as backend:
        await backend.arrivals.admit(prepare(7))
        backend.arrivals.finish(LEG)
        backend.engine.feed(None)
        await wait_until(lambda: not len(backend.arrivals))
        assert backend.engine.closed == [LEG]


async def test_a_shell_is_not_hurried(backend: Backend) -> None:
    async with running_backend(attach_timeout_s=0.01) as backend:
        await backend.arrivals.admit(prepare(7))
        await asyncio.sleep(0.05)
        assert backend.engine.closed == []


async def test_unknown_legs_and_malformed_epochs(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    for request, epoch, status in (("R", "2", 404), ("S", "1", 404), ("R", "x", 400), ("", "1", 400)):
        answer = await backend.client.get(f"{backend.url}/midstream/streams/{request}?epoch={epoch}")
        assert answer.status_code == status
    assert (await backend.client.get(f"{backend.url}/midstream/streams/R")).status_code == 400


async def test_the_reader_closes_and_the_request_is_aborted(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    async with backend.attach("R", 1) as reader:
        await reader.until(event("<7>", 77))
    await wait_until(lambda: backend.engine.closed == [LEG], 1.0)
    assert backend.engine.cancelled.is_set()
    await asyncio.wait_for(backend.arrivals.wait_ended(LEG), 1.0)
    await wait_until(lambda: not len(backend.arrivals))


async def test_a_second_reader_takes_over(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    async with backend.attach("R", 1) as first:
        await first.until(event("<7>", 77))
        async with backend.attach("R", 1) as second:
            assert await second.until(event("<7>", 77)) == first.text
            assert await first.rest() == first.text
            backend.engine.feed(8, None)
            assert (await second.rest()).endswith(DONE)
    assert backend.engine.closed == [LEG]


async def test_a_dropped_leg_is_gone_with_its_stream(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    async with backend.attach("R", 1) as reader:
        await reader.until(event("<7>", 77))
        await backend.arrivals.drop(LEG)
        assert backend.engine.closed == [LEG]
        assert (await reader.rest()).endswith(lost_event("dropped"))
    await backend.arrivals.drop(LEG)
    await backend.arrivals.wait_ended(LEG)
    backend.arrivals.extend(LEG, [TokenStep(1)])
    backend.arrivals.finish(LEG)
    assert len(backend.arrivals) == 0


async def test_a_request_that_the_server_does_not_take_is_refused(backend: Backend) -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"error": {}}, status_code=400)

    backend.engine.handler = handler
    with pytest.raises(Refused) as refused:
        await backend.arrivals.admit(prepare(7))
    assert refused.value.reason == "not_admitted"
    await backend.arrivals.drop(LEG)
    assert len(backend.arrivals) == 0


async def test_an_engine_that_never_takes_the_shell_refuses() -> None:
    async with running_backend(admit_timeout_s=0.05) as backend:

        async def handler(request: Request) -> Response:
            await asyncio.Event().wait()
            return Response()

        backend.engine.handler = handler
        with pytest.raises(Refused) as refused:
            await backend.arrivals.admit(prepare(7))
        assert refused.value.reason == "admit_timeout"
        await backend.arrivals.drop(LEG)
        assert backend.engine.closed == [LEG]


async def test_a_request_comes_back_once_its_earlier_stay_is_over(backend: Backend) -> None:
    async with backend.chat() as stay, asyncio.TaskGroup() as tasks:
        await stay.until(event(""))
        admission = tasks.create_task(backend.arrivals.admit(prepare(7, leg=Leg(RequestId("R"), 2))))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(backend.engine.flights) == 1
        backend.exchange("R").hand_over(moved_event(1))
        await admission
    assert list(backend.engine.flights) == [Leg(RequestId("R"), 2)]


async def test_a_request_that_stays_is_not_taken_a_second_time() -> None:
    async with running_backend(admit_timeout_s=0.05) as backend, backend.chat() as stay:
        await stay.until(event(""))
        with pytest.raises(Refused) as refused:
            await backend.arrivals.admit(prepare(7))
        assert refused.value.reason == "still_here"


async def test_the_same_leg_twice_is_refused(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    with pytest.raises(Refused) as refused:
        await backend.arrivals.admit(prepare(7))
    assert refused.value.reason == "duplicate"
    assert backend.engine.closed == []


async def test_created_is_the_one_the_client_was_shown_and_text_survives(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    backend.engine.feed(event('x "created":100 y "created":77'), event("other", 123), None)
    async with backend.attach("R", 1) as reader:
        text = await reader.rest()
    assert event('x "created":100 y "created":77', 77) in text
    assert event("other", 123) in text


async def test_created_is_its_own_when_the_client_was_shown_none(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(created=None))
    backend.arrivals.finish(LEG)
    backend.engine.feed(None)
    async with backend.attach("R", 1) as reader:
        assert event("", 100) in await reader.rest()


async def test_a_request_that_streams_nothing_arrives(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7, 8, body=CHAT_PLAIN))
    async with backend.attach("R", 1) as reader:
        assert await reader.until(b"id: 2.0;8\n\n") == b"id: 1.0;7\n\nid: 2.0;8\n\n"
        backend.arrivals.extend(LEG, [TokenStep(9), TokenStep(10)])
        backend.arrivals.finish(LEG)
        backend.engine.feed(11, None)
        progress, _, answer = (await reader.rest()).partition(b"event: midstream.answer\ndata: ")
    assert progress == b"".join(b"id: %d.0;%d\n\n" % (n, t) for n, t in enumerate((7, 8, 9, 10, 11), start=1))
    body = json.loads(base64.b64decode(json.loads(answer)["body"]))
    assert body == {"id": "chatcmpl-R", "created": 77, "text": "<7><8><9><10><11>"}


async def test_an_arrived_request_moves_on(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    async with backend.attach("R", 1) as reader:
        before = await reader.until(event("<7>", 77))
        exchange = backend.exchange("R")
        exchange.say(moving_event(2, "i3", "u"))
        exchange.hand_over(moved_event(2))
        assert await reader.rest() == before + moving_event(2, "i3", "u") + moved_event(2)
    assert backend.engine.closed == [LEG]
    assert exchange.flight.created == 77
    await wait_until(lambda: not len(backend.arrivals))


async def test_a_stream_without_a_reader_holds_the_request_back() -> None:
    async with running_backend(stream_buffer_bytes=1000) as backend:
        await backend.arrivals.admit(prepare())
        backend.arrivals.finish(LEG)
        backend.engine.feed(*[b"data: " + b"x" * 100 + b"\n\n"] * 100, None)
        for _ in range(100):
            await asyncio.sleep(0)
        assert backend.engine.parts.qsize() > 80
        async with backend.attach("R", 1) as reader:
            assert (await reader.rest()).count(b"x" * 100) == 100


async def test_a_handler_that_breaks_in_mid_stream_has_lost_the_request(backend: Backend) -> None:
    await backend.arrivals.admit(prepare(7))
    backend.arrivals.finish(LEG)
    async with backend.attach("R", 1) as reader:
        await reader.until(event("<7>", 77))
        backend.engine.feed(RuntimeError("broken"))
        assert (await reader.rest()).endswith(event("<7>", 77) + lost_event("dropped"))


async def test_arrivals_end_with_the_server() -> None:
    async with running_backend() as backend:
        await backend.arrivals.admit(prepare(7))
        engine = backend.engine
    assert engine.closed == [LEG]
