"""A client that lost its gateway reads on at another one, and what it gets in all is, byte for byte, the undisturbed answer."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from backend.registry.memory import MemoryStore
from backend.registry.store import InstanceStore
from gateway.resumable import digest_of
from tests.gateway.conftest import BODY, Rig, make_rig, until
from tests.gateway.scripted import Exchange, Script, chunk, event, shown, told

EVENTS = told()
RESUME = "/midstream/resume"
RESUMABLE = {"x-midstream-resumable": "1", "x-request-id": "r1"}
GREEDY = {"temperature": 0}
IDS = re.compile(rb"^id: ([^\n]*)\n", re.MULTILINE)


@dataclass(eq=False)
class Pair:
    """Two gateways on one store."""

    first: Rig
    second: Rig

    @property
    def store(self) -> InstanceStore:
        return self.first.store

    async def kept(self, tokens: int) -> None:
        """Wait until the store knows so many tokens of the stream."""

        async def is_kept() -> bool:
            stream = await self.store.streams.read("r1")
            return stream is not None and len(stream.tokens) >= tokens

        await until(is_kept)


@asynccontextmanager
async def make_pair(**settings: Any) -> AsyncIterator[Pair]:
    store = MemoryStore(asyncio.get_running_loop().time)
    knobs = {"resumable_interval_s": 0.01, "view_max_age_s": 0, **settings}
    async with make_rig(store, gateway_id="g1", **knobs) as first, make_rig(store, gateway_id="g2", **knobs) as second:
        yield Pair(first, second)


def id_of(at: int) -> str:
    """The id that the client has seen after so many events."""
    tokens, sub, digest = 0, -1, 0
    for one in EVENTS[:at]:
        match = re.match(rb"id: (\d+)\.(\d+);([\d,]*)\n", one)
        assert match
        tokens, sub = int(match[1]), int(match[2])
        digest = digest_of([int(word) for word in match[3].split(b",") if word], digest)
    return f"{tokens}.{sub};{digest:08x}"


def tells(*events: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.stream(*events)

    return script


def holds(*events: bytes) -> Script:
    """Tells these, and then waits for the other side to leave."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*events)
        await exchange.wait_left()

    return script


async def read_events(response: httpx.Response, count: int) -> bytes:
    """Exactly so many events; the rest stays unread."""
    content = b""
    async with asyncio.timeout(5):
        async for part in response.aiter_raw():
            content += part
            if content.count(b"\n\n") >= count:
                break
    return content


@asynccontextmanager
async def reading(rig: Rig, **fields: object) -> AsyncIterator[httpx.Response]:
    async with (
        httpx.AsyncClient(base_url=rig.url, timeout=10) as client,
        client.stream("POST", "/v1/chat/completions", json={**BODY, **fields}, headers=RESUMABLE) as response,
    ):
        yield response


async def come_back(rig: Rig, seen: str | None, request: str = "r1", headers: dict[str, str] | None = None) -> httpx.Response:
    more = {"last-event-id": seen} if seen is not None else {}
    return await rig.client.get(f"/v1/streams/{request}", headers={**(headers or {}), **more})


def order_of(exchange: Exchange) -> dict[str, Any]:
    asked: dict[str, Any] = json.loads(exchange.body)
    return asked


async def test_events_of_such_a_stream_have_ids(rig: Rig) -> None:
    (await rig.add("a")).script = tells(*EVENTS)
    response = await rig.ask(headers=RESUMABLE)
    assert response.headers["x-midstream-resumable"] == "1"
    assert IDS.sub(b"", response.content) == shown(EVENTS)
    assert [seen.decode() for seen in IDS.findall(response.content)] == [id_of(at) for at in range(1, len(EVENTS) + 1)]
    await rig.quiet()


@pytest.mark.parametrize("at", range(1, len(EVENTS) + 1))
async def test_it_goes_on_at_every_event(at: int) -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:at]) if at < len(EVENTS) else tells(*EVENTS)
        backend.others[RESUME] = tells(*EVENTS)
        async with reading(pair.first) as response:
            content = await read_events(response, at)
        assert IDS.findall(content)[-1].decode() == id_of(at)
        again = await come_back(pair.second, id_of(at))
        assert again.status_code == 200
        assert IDS.sub(b"", content + again.content) == shown(EVENTS)
        (asked,) = backend.asked(RESUME)
        order = order_of(asked)
        tokens = min(max(at - 1, 1), 9)
        assert (order["request"], order["epoch"], order["tier"], order["tokens"]) == (
            "r1",
            2_000_000,
            "normal",
            [101 + n for n in range(tokens)],
        )
        assert base64.b64decode(order["http"]["body"]) == backend.seen[0].body
        await pair.first.quiet()
        assert await pair.second.metric('midstream_gateway_resumes_total{outcome="resumed",reason="gateway_lost"} 1.0') is (
            at < len(EVENTS)
        )


async def test_it_goes_on_where_the_client_has_seen_less_than_was_relayed() -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:7])
        backend.others[RESUME] = tells(*EVENTS)
        async with reading(pair.first) as response:
            await read_events(response, 7)
        await pair.kept(6)
        again = await come_back(pair.second, id_of(3))
        assert IDS.sub(b"", again.content) == shown(EVENTS[3:])
        assert [seen.decode() for seen in IDS.findall(again.content)] == [id_of(at) for at in range(4, len(EVENTS) + 1)]
        assert len(order_of(backend.asked(RESUME)[0])["tokens"]) == 6
        whole = await come_back(pair.first, None)
        assert IDS.sub(b"", whole.content) == shown(EVENTS)


async def test_what_was_not_kept_is_computed_again() -> None:
    async with make_pair(resumable_max_tokens=2) as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:7])
        backend.others[RESUME] = tells(*EVENTS)
        async with reading(pair.first, **GREEDY) as response:
            content = await read_events(response, 7)
        await pair.kept(2)
        again = await come_back(pair.second, id_of(7))
        assert IDS.sub(b"", content + again.content) == shown(EVENTS)
        assert order_of(backend.asked(RESUME)[0])["tokens"] == [101, 102]


async def test_what_is_computed_again_otherwise_is_not_shown() -> None:
    others = [one.replace(b";104", b";999") for one in EVENTS]
    async with make_pair(resumable_max_tokens=2) as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:7])
        backend.others[RESUME] = tells(*others)
        async with reading(pair.first, **GREEDY) as response:
            await read_events(response, 7)
        again = await come_back(pair.second, id_of(7))
        assert (again.status_code, again.json()["error"]["code"]) == (409, "stream_diverged")
        await pair.first.quiet()


async def test_chance_does_not_come_twice() -> None:
    async with make_pair(resumable_max_tokens=2, resumable_wait_s=0.1) as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:7])
        async with reading(pair.first) as response:
            await read_events(response, 7)
        again = await come_back(pair.second, id_of(7))
        assert (again.status_code, again.json()["error"]["code"]) == (409, "stream_uncertain")
        assert not backend.asked(RESUME)


@pytest.mark.parametrize("here", [True, False])
async def test_a_connection_that_still_stands_is_taken_over(here: bool) -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:5])
        backend.others[RESUME] = tells(*EVENTS)
        async with reading(pair.first) as response:
            parts = response.aiter_raw()
            content = b""
            while content.count(b"\n\n") < 5:
                content += await anext(parts)
            await pair.kept(4)
            again = await come_back(pair.first if here else pair.second, id_of(5))
            assert IDS.sub(b"", content + again.content) == shown(EVENTS)
            assert again.status_code == 200
            rest = b"".join([part async for part in parts]) if here else b"stream_taken"
        assert b"stream_taken" in rest
        await pair.first.quiet()


async def test_the_gateway_that_had_it_lets_go() -> None:
    """It hears of it from the store, though its own instance tells nothing."""
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:5])
        go_on = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await exchange.head()
            await go_on.wait()
            await exchange.send(*EVENTS)
            await exchange.end()

        backend.others[RESUME] = waits
        async with reading(pair.first) as response:
            parts = response.aiter_raw()
            await anext(parts)
            await pair.kept(4)
            async with asyncio.TaskGroup() as tasks:
                again = tasks.create_task(come_back(pair.second, id_of(5)))
                rest = b"".join([part async for part in parts])
                go_on.set()
            assert b"stream_taken" in rest
            assert IDS.sub(b"", again.result().content) == shown(EVENTS[5:])
        await pair.first.quiet()


async def test_of_two_that_come_back_one_gets_the_rest() -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = holds(*EVENTS[:5])
        go_on = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*EVENTS[:7])
            await go_on.wait()
            await exchange.send(*EVENTS[7:])
            await exchange.end()

        backend.others[RESUME] = waits
        async with reading(pair.first) as response:
            await read_events(response, 5)
        await pair.kept(4)
        async with asyncio.TaskGroup() as tasks:
            back = [tasks.create_task(come_back(rig, id_of(5))) for rig in (pair.first, pair.second)]
            (loser,), (winner,) = await asyncio.wait(back, return_when=asyncio.FIRST_COMPLETED)
            go_on.set()
        assert b"stream_taken" in loser.result().content
        assert IDS.sub(b"", winner.result().content) == shown(EVENTS[5:])
        await pair.first.quiet()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"stream": False}, "no_stream"), ({"n": 2}, "n"), ({"user": "x" * 2000}, "body_too_large")],
)
async def test_what_cannot_be_gone_on_with_says_so(fields: dict[str, object], reason: str) -> None:
    async with make_rig(resumable_max_body_bytes=1000) as rig:
        (await rig.add("a")).script = tells(*EVENTS)
        response = await rig.client.post("/v1/chat/completions", json={**BODY, **fields}, headers=RESUMABLE)
        assert response.headers["x-midstream-resumable"] == f"0; {reason}"
        assert b"id: " not in response.content
        assert (await come_back(rig, None)).status_code == 404


async def test_to_look_at_it_takes_nothing_over() -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = tells(*EVENTS)
        await pair.first.ask(headers=RESUMABLE)
        assert (await pair.second.client.head("/v1/streams/r1")).status_code == 405
        stream = await pair.store.streams.read("r1")
        assert stream is not None
        assert stream.term == 1
        assert len(stream.tokens) == 9


@pytest.mark.parametrize("seen", ["x", "1.0", "1.0;zz", "-1.0;00000000"])
async def test_an_id_that_is_none_of_ours(rig: Rig, seen: str) -> None:
    answer = await come_back(rig, seen)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_last_event_id")


async def test_an_id_of_another_stream() -> None:
    async with make_pair() as pair:
        (await pair.first.add("a")).script = tells(*EVENTS)
        await pair.first.ask(headers=RESUMABLE)
        answer = await come_back(pair.second, "5.0;01234567")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stream_diverged")


async def test_a_stream_that_nobody_knows(rig: Rig) -> None:
    answer = await come_back(rig, "1.0;00000000", "nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


async def test_an_id_that_is_in_use_elsewhere() -> None:
    async with make_pair() as pair:
        (await pair.first.add("a")).script = tells(*EVENTS)
        assert (await pair.first.ask(headers=RESUMABLE)).headers["x-midstream-resumable"] == "1"
        assert (await pair.second.ask(headers=RESUMABLE)).headers["x-midstream-resumable"] == "0; id_in_use"


async def test_the_instance_dies_while_it_is_gone_on_with() -> None:
    async with make_pair() as pair:
        first, second = await pair.first.add("a"), await pair.first.add("b", running=5)

        async def dies(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*EVENTS[:7])
            exchange.cut()

        first.script = holds(*EVENTS[:5])
        first.others[RESUME] = dies
        second.others[RESUME] = tells(*EVENTS)
        async with reading(pair.first) as response:
            content = await read_events(response, 5)
        again = await come_back(pair.second, id_of(5))
        assert IDS.sub(b"", content + again.content) == shown(EVENTS)
        assert [order_of(one.asked(RESUME)[0])["epoch"] for one in (first, second)] == [2_000_000, 2_001_000]


async def test_secrets_are_not_kept_and_come_with_the_client() -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        backend.script = tells(*EVENTS)
        backend.others[RESUME] = tells(*EVENTS)
        await pair.first.ask(headers={**RESUMABLE, "authorization": "Bearer old", "cookie": "old", "x-other": "y"})
        stream = await pair.store.streams.read("r1")
        assert stream is not None
        assert "old" not in stream.request
        await come_back(pair.second, None, headers={"authorization": "Bearer new"})
        headers = order_of(backend.asked(RESUME)[0])["http"]["headers"]
        assert ["authorization", "Bearer new"] in headers
        assert ["x-other", "y"] in headers


def numbered(count: int) -> Sequence[bytes]:
    return [event(n, 0, (100 + n,), chunk(str(n))) for n in range(1, count + 1)]


async def test_a_store_that_forgot_is_told_all_again() -> None:
    async with make_pair() as pair:
        backend = await pair.first.add("a")
        lost = asyncio.Event()
        events = numbered(6)

        async def script(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*events[:3])
            await lost.wait()
            await exchange.send(*events[3:])
            await exchange.wait_left()

        backend.script = script
        async with reading(pair.first) as response:
            parts = response.aiter_raw()
            await anext(parts)
            await pair.kept(3)
            assert isinstance(pair.store, MemoryStore)
            pair.store.streams._kept.clear()
            lost.set()
            await pair.kept(6)
