"""A request whose instance is gone goes on at another one: real backends with modelled engines, over real HTTP."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from backend.llumlet.wire import released_event
from migration.leg import RequestId
from tests.backend.llumlet.live import DEADLINE_S, Reader, running_backend, wait_until
from tests.backend.llumlet.test_two_backends import CURSOR, TOKENS, Site, answer, events, read_tokens, site, spliced, without_created

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SAMPLING: dict[str, Any] = {"model": "fake", "max_tokens": TOKENS, "seed": 7, "temperature": 0.9}
CHAT_BODY = {**SAMPLING, "messages": [{"role": "user", "content": "Which bridge?"}], "ignore_eos": True}


@pytest.fixture
async def here() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=DEADLINE_S))
        one = await stack.enter_async_context(site("i1", client))
        yield one
        await wait_until(lambda: one.engine.load().free_tokens == one.engine.load().capacity_tokens)
        assert len(one.app.flights) == 0


def order(body: dict[str, Any], tokens: Sequence[int], *, path: str = CHAT, epoch: int = 1000, created: int | None = 77) -> dict[str, Any]:
    http = {"path": path, "headers": [["x-request-id", "R"]], "body": base64.b64encode(json.dumps(body).encode()).decode()}
    return {"request": "R", "epoch": epoch, "tier": "normal", "created": created, "tokens": list(tokens), "http": http}


@asynccontextmanager
async def resuming(at: Site, asked: dict[str, Any]) -> AsyncIterator[Reader]:
    async with at.client.stream("POST", f"{at.url}/midstream/resume", json=asked) as response:
        yield Reader(response)


async def resumed(at: Site, asked: dict[str, Any]) -> bytes:
    async with resuming(at, asked) as reader:
        return await reader.rest()


async def undisturbed(at: Site, body: dict[str, Any], path: str = CHAT) -> bytes:
    headers = {"x-midstream-request": "R", "x-request-id": "R"}
    async with at.client.stream("POST", at.url + path, json=body, headers=headers) as response:
        return await Reader(response).rest()


def ids_in(text: bytes) -> list[int]:
    return [int(word) for match in CURSOR.finditer(text) for word in match[3].split(b",") if word]


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, TOKENS - 1, TOKENS])
@pytest.mark.parametrize("variant", ["seeded", "greedy", "logprobs", "stop", "ends_by_itself"])
async def test_a_resumed_stream_is_the_undisturbed_one(here: Site, variant: str, tokens: int) -> None:
    more: dict[str, dict[str, Any]] = {
        "seeded": {},
        "greedy": {"temperature": 0},
        "logprobs": {"logprobs": 2},
        "stop": {"stop": ["e"], "min_tokens": 4},
        "ends_by_itself": {"ignore_eos": False},
    }
    body = {**SAMPLING, "prompt": "Which bridge? ", "stream": True, "ignore_eos": True, **more[variant]}
    wanted = await undisturbed(here, body, COMPLETIONS)
    seen = await resumed(here, order(body, ids_in(wanted)[:tokens], path=COMPLETIONS))
    fresh = [event for cursor, event in events(seen) if cursor[0] > tokens]
    known = [event for cursor, event in events(wanted) if cursor[0] > tokens]
    assert [cursor for cursor, _ in events(seen)] == [cursor for cursor, _ in events(wanted)]
    assert without_created(b"".join(fresh)) == without_created(b"".join(known))
    assert set(re.findall(rb'"created":(\d+)', seen)) == {b"77"}
    assert seen.endswith(b"data: [DONE]\n\n")


async def test_a_chat_stream_keeps_its_role_and_usage(here: Site) -> None:
    body = {**CHAT_BODY, "stream": True, "stream_options": {"include_usage": True}}
    wanted = await undisturbed(here, body)
    assert without_created(await resumed(here, order(body, ids_in(wanted)[:50]))) == without_created(wanted)


@pytest.mark.parametrize("tokens", [1, 50, TOKENS])
async def test_an_answer_that_streams_nothing(here: Site, tokens: int) -> None:
    body = {**CHAT_BODY, "stream": False}
    wanted = await undisturbed(here, body)
    text = await resumed(here, order(body, ids_in(wanted)[:tokens], created=None))
    assert ids_in(text) == ids_in(wanted)
    assert answer(text) == answer(wanted)


async def test_a_client_that_leaves_a_resumed_request_frees_the_engine(here: Site) -> None:
    body = {**CHAT_BODY, "stream": True}
    async with resuming(here, order(body, [5, 6, 7])) as reader:
        await read_tokens(reader, 10)
    await wait_until(lambda: not len(here.app.flights), 1.0)


async def test_a_resumed_request_can_move_and_earlier_epochs_cannot_come(here: Site) -> None:
    body = {**CHAT_BODY, "stream": True}
    wanted = await undisturbed(here, body)
    async with site("i2", here.client) as there, resuming(here, order(body, ids_in(wanted)[:20])) as before:
        await read_tokens(before, 30)
        outcome = await here.move(there, "live")
        assert (outcome["result"], outcome["epoch"]) == ("moved", 1001)
        async with there.attach(1001) as after:
            seen = spliced(await before.rest(), await after.rest())
    assert without_created(seen) == without_created(spliced(wanted))


async def test_what_is_left_of_an_earlier_epoch_goes_first(here: Site) -> None:
    """The request arrived here and ran, and its gateway was never told: it comes with a later epoch."""
    body = {**CHAT_BODY, "stream": True}
    wanted = await undisturbed(here, body)
    async with site("i0", here.client) as old, old.chat(stream=True) as before:
        await read_tokens(before, 20)
        assert (await old.move(here, "live"))["result"] == "moved"
        seen = await resumed(here, order(body, ids_in(wanted)[:20]))
    assert without_created(spliced(seen)) == without_created(spliced(wanted))


async def test_several_answers_cannot_be_resumed(here: Site) -> None:
    seen = await resumed(here, order({**CHAT_BODY, "n": 2, "stream": True}, [5, 6, 7]))
    assert seen == b'event: midstream\ndata: {"kind":"lost","reason":"n"}\n\n'


async def test_a_request_that_the_server_turns_away_is_answered_as_it_is(here: Site) -> None:
    async with resuming(here, order({**CHAT_BODY, "max_tokens": -1}, [5])) as reader:
        assert reader.status == 400
        assert b"max_tokens" in await reader.rest()


@pytest.mark.parametrize(
    "damage",
    [{"tokens": None}, {"tokens": ["x"]}, {"epoch": "x"}, {"request": ""}, {"http": {}}, {"created": "x"}],
)
async def test_an_order_that_makes_no_sense(here: Site, damage: dict[str, Any]) -> None:
    response = await here.client.post(f"{here.url}/midstream/resume", json={**order(CHAT_BODY, [5]), **damage})
    assert response.status_code == 400
    assert response.json()["error"]["code"] in ("bad_resumption", "bad_leg")


async def test_other_paths_and_a_draining_instance(here: Site) -> None:
    response = await here.client.post(f"{here.url}/midstream/resume", json=order(CHAT_BODY, [5], path="/v1/models"))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "not_resumable")
    here.app.drain.begin()
    response = await here.client.post(f"{here.url}/midstream/resume", json=order(CHAT_BODY, [5]))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "instance_draining")


async def test_an_engine_that_does_not_take_it_in_time() -> None:
    async with running_backend(admit_timeout_s=0.1) as backend:

        async def deaf(_: object) -> Any:
            await asyncio.Event().wait()

        backend.engine.handler = deaf
        asked = order({"stream": True}, [5])
        async with backend.client.stream("POST", f"{backend.url}/midstream/resume", json=asked) as response:
            assert (await Reader(response).rest()).endswith(b'"lost","reason":"timeout"}\n\n')
        await wait_until(lambda: not len(backend.app.flights))


async def test_a_request_that_is_let_go_says_so(here: Site) -> None:
    async with here.chat(stream=True) as reader:
        await read_tokens(reader, 10)
        exchange = here.app.flights.latest(RequestId("R"))
        assert exchange is not None
        exchange.release("draining")
        assert (await reader.rest()).endswith(released_event("draining"))
    await wait_until(lambda: not len(here.app.flights), 1.0)
