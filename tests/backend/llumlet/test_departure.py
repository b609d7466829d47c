"""Requests whose gateway is on the line, over a real server."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from backend.engine.flight import current_flight
from backend.llumlet.wire import kept_event, moved_event, moving_event
from migration.leg import Leg, RequestId
from migration.messages import TokenStep
from tests.backend.llumlet.live import CHAT_PLAIN, CHAT_STREAM, Backend, running_backend, wait_until
from tests.backend.llumlet.scripted_engine import CHAT, Handler, event

LEG = Leg(RequestId("R"), 0)
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with running_backend() as backend:
        yield backend


def streams(*bodies: bytes, tokens: int = 0, media_type: str = "text/event-stream") -> Handler:
    """A handler that sends these body messages, noting one token before each of the first `tokens` ones."""

    async def chunks() -> AsyncIterator[bytes]:
        flight = current_flight.get()
        for index, body in enumerate(bodies):
            if flight is not None and index < tokens:
                flight.note_tokens([TokenStep(index + 10)])
                flight.note_yielded(1)
            yield body

    async def handler(request: Request) -> Response:
        return StreamingResponse(chunks(), media_type=media_type)

    return handler


async def test_every_event_gets_its_cursor(backend: Backend) -> None:
    backend.engine.feed(7, 8, None)
    async with backend.chat() as reader:
        text = await reader.rest()
    assert reader.status == 200
    assert reader.headers["content-type"].startswith("text/event-stream")
    assert text == (b"id: 0.0;\n" + event("") + b"id: 1.0;7\n" + event("<7>") + b"id: 2.0;8\n" + event("<8>") + b"id: 2.1;\n" + DONE)
    assert backend.engine.closed == [LEG]


async def test_the_flight_holds_the_original_request(backend: Backend) -> None:
    async with backend.chat() as reader:
        await reader.until(event(""))
        flight = backend.engine.flights[LEG]
        assert (flight.http.path, flight.http.body, flight.tier, flight.rank) == (CHAT, CHAT_STREAM, "high", 1)
        assert ("x-midstream-request", "R") in flight.http.headers
        assert (flight.created, flight.replay) == (100, None)
        (told,) = await backend.requests()
        assert told == {
            "request": "R",
            "epoch": 0,
            "tier": "high",
            "output_tokens": 0,
            "prompt_tokens": 5,
            "state": "waiting",
            "unmovable": None,
        }


async def test_without_the_header_nothing_is_touched(backend: Backend) -> None:
    backend.engine.feed(7, None)
    async with backend.chat(request=None) as reader:
        assert await reader.rest() == event("") + event("<7>") + DONE
    other = await backend.client.post(f"{backend.url}/v1/embeddings", content=b"x", headers={"x-midstream-request": "R"})
    assert other.json() == {"path": "/v1/embeddings", "body": "x"}
    assert backend.engine.seen == [None]
    assert backend.engine.closed == []


async def test_several_events_in_one_body_message(backend: Backend) -> None:
    backend.engine.handler = streams(b"data: a\n\ndata: b\n\n", DONE, tokens=1)
    async with backend.chat() as reader:
        assert await reader.rest() == b"id: 1.0;10\ndata: a\n\nid: 1.1;\ndata: b\n\nid: 1.2;\n" + DONE


async def test_one_event_over_several_body_messages(backend: Backend) -> None:
    backend.engine.handler = streams(b"data: \xf0\x9f", b"\x98\x80\n", b"\ndata: [DO", b"NE]\n\n", tokens=1)
    async with backend.chat() as reader:
        assert await reader.rest() == "id: 1.0;10\ndata: 😀\n\n".encode() + b"id: 1.1;\n" + DONE


async def test_crlf_events(backend: Backend) -> None:
    backend.engine.handler = streams(b"data: a\r\n\r", b"\ndata: b\r\n\r\n", tokens=0)
    async with backend.chat() as reader:
        assert await reader.rest() == b"id: 0.0;\ndata: a\r\n\r\nid: 0.1;\ndata: b\r\n\r\n"


async def test_an_unfinished_last_event_is_not_lost(backend: Backend) -> None:
    backend.engine.handler = streams(b"data: a\n\ndata: b\n", tokens=0)
    async with backend.chat() as reader:
        assert await reader.rest() == b"id: 0.0;\ndata: a\n\ndata: b\n"


async def test_errors_pass_as_they_are(backend: Backend) -> None:
    async def handler(request: Request) -> Response:
        return JSONResponse({"error": {"message": "too long"}}, status_code=400, headers={"x-why": "because"})

    backend.engine.handler = handler
    for body in (CHAT_STREAM, CHAT_PLAIN, b"{not json"):
        async with backend.chat(body) as reader:
            assert await reader.rest() == b'{"error":{"message":"too long"}}'
        assert (reader.status, reader.headers["x-why"], reader.headers["content-length"]) == (400, "because", "32")


async def test_an_answer_to_a_stream_request_that_is_no_event_stream_passes(backend: Backend) -> None:
    backend.engine.handler = streams(b"plain", b" text", media_type="text/plain")
    async with backend.chat() as reader:
        assert await reader.rest() == b"plain text"
    assert (reader.status, reader.headers["content-type"]) == (200, "text/plain; charset=utf-8")


async def test_a_handler_that_fails_before_its_first_byte_is_an_error(backend: Backend) -> None:
    async def handler(request: Request) -> Response:
        raise RuntimeError("broken")

    async def nothing() -> AsyncIterator[bytes]:
        for _ in range(backend.engine.parts.qsize()):
            yield b""
        raise RuntimeError("broken after its head")

    async def late(request: Request) -> Response:
        return StreamingResponse(nothing(), media_type="text/event-stream")

    for failing in (handler, late):
        backend.engine.handler = failing
        for body in (CHAT_STREAM, CHAT_PLAIN):
            async with backend.chat(body) as reader:
                assert json.loads(await reader.rest())["error"]["code"] == "internal_error"
            assert reader.status == 500
    assert backend.engine.flights == {}


async def test_a_handler_that_fails_in_mid_stream_cuts_the_connection(backend: Backend) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: a\n\n"
        raise RuntimeError("broken")

    async def handler(request: Request) -> Response:
        return StreamingResponse(chunks(), media_type="text/event-stream")

    backend.engine.handler = handler
    async with backend.chat() as reader:
        with pytest.raises(httpx.RemoteProtocolError):
            await reader.rest()
    assert reader.text == b"id: 0.0;\ndata: a\n\n"


async def test_what_a_server_says_of_its_failed_engine_is_not_for_the_client(backend: Backend) -> None:
    """vLLM ends the stream with an error event and [DONE]: the gateway would take it for the answer's end, and could not resume."""
    backend.engine.feed(7)
    async with backend.chat() as reader:
        await reader.until(event("<7>"))
        backend.engine.flights[LEG].failed = True
        backend.engine.feed(b'data: {"error":{"message":"EngineDead"}}\n\n', None)
        with pytest.raises(httpx.RemoteProtocolError):
            await reader.rest()
    assert reader.text == b"id: 0.0;\n" + event("") + b"id: 1.0;7\n" + event("<7>")
    await wait_until(lambda: backend.engine.closed == [LEG])


async def test_a_request_that_streams_nothing_shows_progress_and_then_its_answer(backend: Backend) -> None:
    backend.engine.feed(7)
    async with backend.chat(CHAT_PLAIN) as reader:
        assert await reader.until(b"\n\n") == b"id: 1.0;7\n\n"
        backend.engine.feed(8, None)
        text = await reader.rest()
    assert (reader.status, reader.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    progress, _, answer = text.partition(b"event: midstream.answer\ndata: ")
    assert progress == b"id: 1.0;7\n\nid: 2.0;8\n\n"
    fields = json.loads(answer)
    assert fields["status"] == 200
    assert ["content-type", "application/json"] in fields["headers"]
    assert json.loads(base64.b64decode(fields["body"])) == {"id": "chatcmpl-R", "created": 100, "text": "<7><8>"}


async def test_an_error_after_progress_comes_as_the_answer(backend: Backend) -> None:
    async def handler(request: Request) -> Response:
        flight = current_flight.get()
        assert flight is not None
        flight.note_tokens([TokenStep(1)])
        await request.json()
        await backend.engine.parts.get()
        return JSONResponse({"error": {}}, status_code=500)

    backend.engine.handler = handler
    async with backend.chat(CHAT_PLAIN) as reader:
        await reader.until(b"id: 1.0;1\n\n")
        backend.engine.feed(None)
        answer = (await reader.rest()).partition(b"data: ")[2]
    assert reader.status == 200
    assert json.loads(answer)["status"] == 500


@pytest.mark.parametrize("body", [CHAT_STREAM, CHAT_PLAIN], ids=["stream", "plain"])
@pytest.mark.parametrize("tokens", [0, 2], ids=["before the first token", "after some"])
async def test_a_client_that_leaves_frees_the_engine(backend: Backend, body: bytes, tokens: int) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        async with backend.chat(body) as reader:
            if tokens:
                await reader.until(event("<7>") if body == CHAT_STREAM else b";7\n\n")
            reading.set()
            await reader.rest()

    client = asyncio.get_running_loop().create_task(read())
    await backend.engine.started.wait()
    if tokens:
        backend.engine.feed(7)
        await reading.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    await wait_until(lambda: backend.engine.closed == [LEG], 1.0)
    assert backend.engine.cancelled.is_set()
    assert await backend.requests() == []


async def test_a_client_that_leaves_while_the_handler_prepares_frees_the_engine(backend: Backend) -> None:
    async def deaf(request: Request) -> Response:
        backend.engine.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            backend.engine.cancelled.set()
            raise
        return Response()

    backend.engine.handler = deaf
    client = asyncio.get_running_loop().create_task(_read_all(backend))
    await backend.engine.started.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    await wait_until(lambda: backend.engine.closed == [LEG], 1.0)
    assert backend.engine.cancelled.is_set()


async def test_a_client_that_leaves_while_sending_its_body_opens_no_flight(backend: Backend) -> None:
    host, port = backend.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-midstream-request: R\r\ncontent-length: 100\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    backend.engine.feed(None)
    async with backend.chat(request="S") as reader:
        await reader.rest()
    assert backend.engine.closed == [Leg(RequestId("S"), 0)]


async def _read_all(backend: Backend) -> bytes:
    async with backend.chat() as reader:
        return await reader.rest()


async def test_malformed_legs_and_duplicates_are_refused(backend: Backend) -> None:
    for headers in ({"x-midstream-request": "R", "x-midstream-epoch": "x"}, {"x-midstream-request": ""}):
        answer = await backend.client.post(f"{backend.url}{CHAT}", content=CHAT_STREAM, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_leg")
    async with backend.chat() as first:
        await first.until(event(""))
        async with backend.chat() as second:
            assert (second.status, json.loads(await second.rest())["error"]["code"]) == (409, "duplicate_request")


async def test_a_body_over_the_limit_is_refused() -> None:
    async with running_backend(max_body_bytes=10) as backend, backend.chat() as reader:
        assert (reader.status, json.loads(await reader.rest())["error"]["code"]) == (413, "body_too_large")


async def test_control_events_stand_between_events_and_moved_is_the_last_word(backend: Backend) -> None:
    backend.engine.handler = streams_forever(backend, b"data: a\n\ndata: b")
    async with backend.chat() as reader:
        await reader.until(b"data: a\n\n")
        exchange = backend.exchange("R")
        exchange.say(moving_event(1, "i2", "u"))
        exchange.say(kept_event(1))
        exchange.say(moving_event(2, "i3", "u"))
        backend.engine.feed(None)
        await reader.until(b"data: b\n\n")
        exchange.hand_over(moved_event(2))
        text = await reader.rest()
    controls = moving_event(1, "i2", "u") + kept_event(1) + moving_event(2, "i3", "u")
    assert text == b"id: 0.0;\ndata: a\n\n" + controls + b"id: 0.1;\ndata: b\n\n" + moved_event(2)
    await wait_until(lambda: backend.engine.closed == [LEG])
    assert backend.engine.cancelled.is_set()


def streams_forever(backend: Backend, first: bytes) -> Handler:
    async def chunks() -> AsyncIterator[bytes]:
        yield first
        await backend.engine.parts.get()
        yield b"\n\n"
        try:
            await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            backend.engine.cancelled.set()
            raise

    async def handler(request: Request) -> Response:
        return StreamingResponse(chunks(), media_type="text/event-stream")

    return handler


async def test_what_the_handler_says_after_moved_is_swallowed(backend: Backend) -> None:
    async def stubborn(request: Request) -> Response:
        await request.json()

        async def chunks() -> AsyncIterator[bytes]:
            yield b"data: a\n\n"
            await backend.engine.parts.get()
            while True:
                yield b"data: late\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    backend.engine.handler = stubborn
    async with backend.chat() as reader:
        await reader.until(b"data: a\n\n")
        backend.exchange("R").hand_over(moved_event(1))
        backend.engine.feed(None)
        assert await reader.rest() == b"id: 0.0;\ndata: a\n\n" + moved_event(1)


@pytest.mark.parametrize("body", [CHAT_STREAM, CHAT_PLAIN], ids=["stream", "plain"])
async def test_a_request_may_move_before_it_has_said_anything(backend: Backend, body: bytes) -> None:
    async def silent(request: Request) -> Response:
        backend.engine.started.set()
        await asyncio.Event().wait()
        return Response()

    backend.engine.handler = silent
    client = asyncio.get_running_loop().create_task(_read_all(backend))
    await backend.engine.started.wait()
    backend.exchange("R").hand_over(moved_event(1))
    assert await client == moved_event(1)


async def test_created_that_was_fixed_before_the_first_event_is_shown(backend: Backend) -> None:
    async def handler(request: Request) -> Response:
        flight = current_flight.get()
        assert flight is not None
        flight.created = 42  # as a migration does that begins before the first event

        async def chunks() -> AsyncIterator[bytes]:
            yield event("a", 100)
            yield event("b", 101)
            yield event('"created":100', 100)

        return StreamingResponse(chunks(), media_type="text/event-stream")

    backend.engine.handler = handler
    async with backend.chat() as reader:
        text = await reader.rest()
    assert text == b"id: 0.0;\n" + event("a", 42) + b"id: 0.1;\n" + event("b", 101) + b"id: 0.2;\n" + event('"created":100', 42)


async def test_a_slow_client_holds_the_handler_back(backend: Backend) -> None:
    sent = 0

    async def handler(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 1
                yield b"data: " + b"x" * 100_000 + b"\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    backend.engine.handler = handler
    async with backend.chat():
        before = -1
        while sent != before:  # until it stands still
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 1000
        exchange = backend.exchange("R")
        exchange.say(kept_event(1))  # does not wait for the client either
    await wait_until(lambda: backend.engine.closed == [LEG], 1.0)
