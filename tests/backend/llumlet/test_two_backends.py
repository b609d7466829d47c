"""Moves between real backends: llumlet, session and reception, with modelled engines, over real HTTP."""

import asyncio
import base64
import gc
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from backend.engine.fake.engine import FakeEngine, build_fake_engine
from backend.engine.fake.settings import FakeSettings
from backend.llumlet.app import BackendApp, build
from backend.llumlet.buffer import StreamBuffer
from backend.llumlet.settings import LlumletSettings
from backend.registry.memory import MemoryStore
from tests.backend.llumlet.live import DEADLINE_S, Reader, serving, wait_until

TOKENS = 120
CURSOR = re.compile(rb"id: (\d+)\.(\d+);([\d,]*)\n")


@dataclass(frozen=True, slots=True)
class Site:
    """One served backend."""

    instance: str
    url: str
    engine: FakeEngine
    app: BackendApp
    client: httpx.AsyncClient

    @asynccontextmanager
    async def chat(self, *, stream: bool, request: str = "R") -> AsyncIterator[Reader]:
        body = {"model": "fake", "messages": [{"role": "user", "content": "Which bridge?"}], "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"stream": stream, "seed": 7, "temperature": 0.9}
        headers = {"x-midstream-request": request, "x-request-id": request}
        async with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            yield Reader(response)

    @asynccontextmanager
    async def attach(self, epoch: int) -> AsyncIterator[Reader]:
        async with self.client.stream("GET", f"{self.url}/midstream/streams/R?epoch={epoch}") as response:
            assert response.status_code == 200
            yield Reader(response)

    async def move(self, to: "Site", mode: str) -> dict[str, object]:
        plan = {"request": "R", "destination": {"instance": to.instance, "url": to.url}, "mode": mode}
        answer: dict[str, object] = (await self.client.post(f"{self.url}/midstream/migrations", json=plan)).json()
        return answer


@asynccontextmanager
async def site(instance: str, client: httpx.AsyncClient) -> AsyncIterator[Site]:
    engine = build_fake_engine(FakeSettings.model_validate({"decode_base_s": 0.004}), "127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = LlumletSettings(instance_id=instance, advertised_url=url)
    app = build(engine, settings, MemoryStore(asyncio.get_running_loop().time))
    async with serving(app, listener):
        yield Site(instance, url, engine, app, client)


@pytest.fixture
async def sites() -> AsyncIterator[tuple[Site, Site]]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=DEADLINE_S))
        first = await stack.enter_async_context(site("i1", client))
        second = await stack.enter_async_context(site("i2", client))
        yield first, second
        for one in (first, second):
            await wait_until(lambda one=one: one.engine.load().free_tokens == one.engine.load().capacity_tokens)  # type: ignore[misc]
            assert len(one.app.flights) == 0


async def read_tokens(reader: Reader, tokens: int) -> None:
    """Read on until at least that many tokens were seen."""
    while not any(int(match[1]) >= tokens for match in CURSOR.finditer(reader.text)):
        reader.text += await reader.next()


def events(text: bytes) -> list[tuple[tuple[int, int], bytes]]:
    """The events with a cursor: (cursor, event without it), in order."""
    matches = [(CURSOR.match(block), block) for block in re.findall(rb".*?\n\n", text, re.DOTALL)]
    return [((int(match[1]), int(match[2])), block[match.end() :]) for match, block in matches if match]


def spliced(*texts: bytes) -> bytes:
    """What a client sees of a stream that moved: each text from where the one before ends, by cursor."""
    last, out = (-1, -1), b""
    for text in texts:
        for cursor, event in events(text):
            if cursor > last:
                last, out = cursor, out + event
    return out


def without_created(text: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', text)


async def unmoved(at: Site, *, stream: bool) -> bytes:
    async with at.chat(stream=stream) as reader:
        return await reader.rest()


@pytest.mark.parametrize("mode", ["live", "stop_copy", "recompute"])
async def test_a_moved_stream_is_the_unmoved_one(sites: tuple[Site, Site], mode: str) -> None:
    here, there = sites
    wanted = await unmoved(there, stream=True)
    async with here.chat(stream=True) as before:
        await read_tokens(before, 20)
        outcome = await here.move(there, mode)
        assert (outcome["result"], outcome["epoch"]) == ("moved", 1)
        async with there.attach(1) as after:
            text = await before.rest()
            assert text.endswith(b'event: midstream\ndata: {"kind":"moved","epoch":1}\n\n')
            seen = spliced(text, await after.rest())
    assert without_created(seen) == without_created(spliced(wanted))
    assert len(set(re.findall(rb'"created":\d+', seen))) == 1
    assert (int(str(outcome["bytes"])) > 0) is (mode != "recompute")


async def test_there_and_back_again(sites: tuple[Site, Site]) -> None:
    here, there = sites
    wanted = await unmoved(there, stream=True)
    async with here.chat(stream=True) as first:
        await read_tokens(first, 15)
        assert (await here.move(there, "live"))["result"] == "moved"
        async with there.attach(1) as second:
            await read_tokens(second, 50)
            assert (await there.move(here, "live"))["result"] == "moved"
            async with here.attach(2) as third:
                seen = spliced(await first.rest(), await second.rest(), await third.rest())
    assert without_created(seen) == without_created(spliced(wanted))


async def test_a_request_that_streams_nothing_moves(sites: tuple[Site, Site]) -> None:
    here, there = sites
    wanted = await unmoved(there, stream=False)
    async with here.chat(stream=False) as before:
        await read_tokens(before, 20)
        assert (await here.move(there, "live"))["result"] == "moved"
        async with there.attach(1) as after:
            text = await after.rest()
    ids = [match[3] for match in CURSOR.finditer(text)]
    assert ids == [match[3] for match in CURSOR.finditer(wanted)]
    assert len(ids) == TOKENS
    assert answer(text) == answer(wanted)


def answer(text: bytes) -> object:
    fields = json.loads(text.partition(b"event: midstream.answer\ndata: ")[2])
    assert fields["status"] == 200
    return without_created(base64.b64decode(fields["body"]))


async def test_a_client_that_leaves_while_its_request_moves_frees_both_sides(sites: tuple[Site, Site]) -> None:
    here, there = sites
    async with here.chat(stream=True) as before:
        await read_tokens(before, 20)
        moving = asyncio.get_running_loop().create_task(here.move(there, "live"))
        await asyncio.sleep(0)
    outcome = await moving
    assert outcome.get("result") in ("ended", "moved", None)  # None: it had left before the order came
    if outcome.get("result") == "moved":
        async with there.attach(1):
            pass  # and leaves there too


async def test_nothing_of_a_stream_is_kept_once_it_has_been_read(sites: tuple[Site, Site]) -> None:
    """What is remembered of a move, for as long as its messages may be repeated, once held the whole stream."""
    here, there = sites
    others = [one for one in gc.get_objects() if type(one) is StreamBuffer]  # the traceback of a failed test holds its own
    async with here.chat(stream=True) as before:
        await read_tokens(before, 20)
        assert (await here.move(there, "live"))["result"] == "moved"
        async with there.attach(1) as after:
            await before.rest()
            await after.rest()

    def is_gone() -> bool:
        gc.collect()
        return sum(type(one) is StreamBuffer for one in gc.get_objects()) <= len(others)

    await wait_until(is_gone)
