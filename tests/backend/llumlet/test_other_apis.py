"""Anthropic's messages and OpenAI's responses move and are resumed between real backends: what a client sees is one undisturbed answer."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.backend.llumlet.live import Reader
from tests.backend.llumlet.test_resumption import here as here
from tests.backend.llumlet.test_resumption import ids_in, order, resumed
from tests.backend.llumlet.test_two_backends import TOKENS, Site, answer, events, read_tokens, spliced
from tests.backend.llumlet.test_two_backends import sites as sites

SAMPLING: dict[str, Any] = {"model": "fake", "seed": 7, "temperature": 0.9, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {**SAMPLING, "messages": [{"role": "user", "content": "Which bridge?"}], "max_tokens": TOKENS, "system": "Be brief."},
    "/v1/responses": {**SAMPLING, "input": "Which bridge?", "max_output_tokens": TOKENS},
}
LAST = {"/v1/messages": b"event: message_stop\n", "/v1/responses": b"event: response.completed\n"}
RANDOM = re.compile(rb"(resp|msg)_[0-9a-f]{16}")
paths = pytest.mark.parametrize("path", BODIES)


@asynccontextmanager
async def asking(at: Site, path: str, *, stream: bool) -> AsyncIterator[Reader]:
    headers = {"x-midstream-request": "R", "x-request-id": "R"}
    async with at.client.stream("POST", at.url + path, json={**BODIES[path], "stream": stream}, headers=headers) as response:
        yield Reader(response)


async def undisturbed(at: Site, path: str, *, stream: bool) -> bytes:
    async with asking(at, path, stream=stream) as reader:
        return await reader.rest()


def comparable(text: bytes) -> bytes:
    return re.sub(rb'"created_at":\d+', b'"created_at":0', text)


@paths
@pytest.mark.parametrize("mode", ["live", "recompute"])
async def test_a_moved_stream_is_the_unmoved_one(sites: tuple[Site, Site], path: str, mode: str) -> None:
    here, there = sites
    wanted = spliced(await undisturbed(there, path, stream=True))
    assert LAST[path] in wanted
    async with asking(here, path, stream=True) as before:
        await read_tokens(before, 20)
        assert (await here.move(there, mode))["result"] == "moved"
        async with there.attach(1) as after:
            seen = spliced(await before.rest(), await after.rest())
    assert comparable(seen) == comparable(wanted)
    assert len(set(re.findall(rb'"created_at":(\d+)', seen))) == (path == "/v1/responses")


@paths
async def test_there_and_back_again(sites: tuple[Site, Site], path: str) -> None:
    here, there = sites
    wanted = spliced(await undisturbed(there, path, stream=True))
    async with asking(here, path, stream=True) as first:
        await read_tokens(first, 15)
        assert (await here.move(there, "live"))["result"] == "moved"
        async with there.attach(1) as second:
            await read_tokens(second, 50)
            assert (await there.move(here, "live"))["result"] == "moved"
            async with here.attach(2) as third:
                seen = spliced(await first.rest(), await second.rest(), await third.rest())
    assert comparable(seen) == comparable(wanted)


@paths
async def test_a_whole_answer_moves(sites: tuple[Site, Site], path: str) -> None:
    here, there = sites
    wanted = await undisturbed(there, path, stream=False)
    async with asking(here, path, stream=False) as before:
        await read_tokens(before, 20)
        assert (await here.move(there, "live"))["result"] == "moved"
        async with there.attach(1) as after:
            text = await after.rest()
    assert ids_in(text) == ids_in(wanted)
    assert RANDOM.sub(b"", comparable(whole(text))) == RANDOM.sub(b"", comparable(whole(wanted)))


def whole(text: bytes) -> bytes:
    body = answer(text)
    assert isinstance(body, bytes)
    return body


@paths
@pytest.mark.parametrize("tokens", [0, 1, 50, TOKENS])
async def test_a_resumed_stream_is_the_undisturbed_one(here: Site, path: str, tokens: int) -> None:
    wanted = await undisturbed(here, path, stream=True)
    seen = await resumed(here, order({**BODIES[path], "stream": True}, ids_in(wanted)[:tokens], path=path))
    assert events(comparable(seen)) == events(comparable(wanted))
    assert set(re.findall(rb'"created_at":(\d+)', seen)) <= {b"77"}


async def test_names_are_drawn_anew_for_each_request(here: Site) -> None:
    """By the engine itself, that is, as it is asked without a gateway; and those of a relayed answer differ from request to request."""
    body = {**BODIES["/v1/responses"], "stream": True}
    drawn = [set(RANDOM.findall((await here.client.post(here.url + "/v1/responses", json=body)).content)) for _ in range(2)]
    assert drawn[0] == drawn[1] == {b"resp", b"msg"}
    names = set()
    for request in ("R", "S"):
        headers = {"x-midstream-request": request, "x-request-id": request}
        content = (await here.client.post(here.url + "/v1/responses", json=body, headers=headers)).content
        names |= {found[0] for found in RANDOM.finditer(content)}
    assert len(names) == 4
