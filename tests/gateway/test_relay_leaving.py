"""A client that leaves, in any phase, leaves nothing behind: claims back to zero, every connection to instances closed, within a second."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from gateway.client_connection import GatheringTransport
from gateway.downstream import Downstream
from gateway.http_connection import Connection
from gateway.passthrough import Passage
from gateway.protocol import BoundedProtocol
from gateway.relay import Relay
from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.scripted import Exchange, Script, control, event, head_of_attachment, moving, told

BODY = b'{"model":"m","prompt":"x","stream":true}'
EVENTS = told()
KEPT = (Relay, Passage, Downstream, BoundedProtocol, Connection, GatheringTransport)
STREAMS = "/midstream/streams/"
RESUME = "/midstream/resume"


async def before_head(exchange: Exchange) -> None:
    await exchange.wait_left()


async def after_head(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.wait_left()


async def streaming(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(*EVENTS[:3])
    await exchange.wait_left()


async def inside_event(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(*EVENTS[:3], EVENTS[3][:-5])
    await exchange.wait_left()


async def progressing(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(event(1, 0, (1,), b"\n"))
    await exchange.wait_left()


async def dies(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(*EVENTS[:3])
    exchange.cut()


async def after_done(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(*EVENTS)
    await exchange.wait_left()


@pytest.mark.parametrize("script", [before_head, after_head, streaming, inside_event, progressing, after_done])
async def test_leaving_one_instance(rig: Rig, script: Script) -> None:
    backend = await rig.add("a")
    backend.script = script
    await leave_when(rig, lambda: bool(backend.seen))


async def test_leaving_while_the_body_is_sent(rig: Rig) -> None:
    backend = await rig.add("a")
    url = urlsplit(rig.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await until_metric(rig, 'midstream_gateway_requests_total{outcome="client_left",tier="normal"} 1.0')
    await rig.quiet()
    assert not backend.seen


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("attachment", [before_head, after_head])
async def test_leaving_while_moving(rig: Rig, moved: bool, attachment: Script) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def move(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:3], moving(1, destination))
        await until(lambda: bool(destination.seen))
        if moved:
            await exchange.send(control(kind="moved", epoch=1))
        await exchange.wait_left()

    source.script = move
    destination.others[STREAMS] = attachment
    await leave_when(rig, lambda: destination.open == 1)


async def test_leaving_after_the_move(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def move(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:3], moving(1, destination))
        await until(lambda: bool(destination.seen))
        await exchange.send(control(kind="moved", epoch=1))
        await exchange.end()

    async def go_on(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(head_of_attachment(), *EVENTS[:6])
        await exchange.wait_left()

    source.script = move
    destination.others[STREAMS] = go_on
    await leave_when(rig, lambda: destination.open == 1 and source.open == 0)


@pytest.mark.parametrize("resumed", [before_head, after_head])
async def test_leaving_while_it_is_resumed(rig: Rig, resumed: Script) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)
    first.script = dies
    second.others[RESUME] = resumed
    await leave_when(rig, lambda: second.open == 1 and first.open == 0)


async def test_leaving_while_nobody_is_there_who_could_resume_it() -> None:
    async with make_rig(resume_wait_s=30) as rig:
        backend = await rig.add("a")
        backend.script = dies
        await leave_when(rig, lambda: bool(backend.seen) and backend.open == 0, claims=None)


async def test_leaving_after_it_was_resumed(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=1)

    async def go_on(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:6])
        await exchange.wait_left()

    first.script, second.others[RESUME] = dies, go_on
    await leave_when(rig, lambda: second.open == 1 and first.open == 0)


async def test_leaving_without_reading(rig: Rig) -> None:
    """The gateway is stuck in a write when the client leaves."""
    sent = 0

    async def firehose(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.head()
        while True:
            await exchange.send(event(1, 0, (1,), b"data: " + b"x" * 60_000 + b"\n\n"))
            sent += 1

    backend = await rig.add("a")
    backend.script = firehose
    before = -1

    def is_stuck() -> bool:
        nonlocal before
        stuck, before = sent == before, sent
        return stuck and sent > 10

    url = urlsplit(rig.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port, limit=1024)
    writer.write(_request())
    await writer.drain()
    await until(lambda: sent > 10)
    for _ in range(100):
        if is_stuck():
            break
        await asyncio.sleep(0.1)
    writer.transport.abort()
    await rig.quiet()


async def test_claims_are_back_after_many_leave_at_random_moments(rig: Rig) -> None:
    backends = [await rig.add("a"), await rig.add("b")]

    async def slowly(exchange: Exchange) -> None:
        await exchange.head()
        for one in EVENTS:
            await exchange.send(one)
            await asyncio.sleep(0.002)
        await exchange.end()

    for backend in backends:
        backend.script = slowly

    async def visit(stay_s: float) -> None:
        url = urlsplit(rig.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(_request())
        await asyncio.sleep(stay_s)
        writer.transport.abort()

    async with asyncio.TaskGroup() as tasks:
        for visitor in range(60):
            tasks.create_task(visit(visitor * 0.0007))
    await rig.quiet()
    assert await rig.metric("midstream_gateway_live_requests 0.0")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("script", [before_head, after_head, streaming])
async def test_who_leaves_is_forgotten_without_a_collector_of_cycles(rig: Rig, path: str, script: Script) -> None:
    backend = await rig.add("a")
    backend.script = backend.others["/v1/embeddings"] = script
    await rig.metric("")  # the connection of whoever asks for that stays
    async with nothing_kept():
        for _ in range(3):
            await leave_when(rig, lambda: backend.open > 0, path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("heads", [0, 1])
async def test_what_failed_is_forgotten_without_a_collector_of_cycles(rig: Rig, path: str, heads: int) -> None:
    async def broken(exchange: Exchange) -> None:
        if heads:
            await exchange.head()
            await exchange.send(*EVENTS[:3])
        exchange.cut()

    backend = await rig.add("a")
    backend.script = backend.others["/v1/embeddings"] = broken
    await rig.client.post(path, content=BODY)  # its connection stays
    async with nothing_kept():
        for _ in range(3):
            await rig.client.post(path, content=BODY)


@asynccontextmanager
async def nothing_kept() -> AsyncIterator[None]:
    """Requests that are over leave nothing behind: a gateway that serves long prompts would else hold many of them for a while."""

    def held() -> int:
        return sum(issubclass(type(one), KEPT) for one in gc.get_objects())

    gc.collect()
    before = held()
    gc.disable()
    try:
        yield
        await until(lambda: held() <= before)
    finally:
        gc.enable()


def _request(path: str = "/v1/completions") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(BODY), BODY)


async def leave_when(rig: Rig, condition: Callable[[], bool], path: str = "/v1/completions", claims: int | None = 1) -> None:
    """Ask, wait for the condition and for one more turn of everybody, close the connection, and see everything freed."""
    url = urlsplit(rig.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(_request(path))
    await writer.drain()
    await until(condition)
    assert claims is None or len(await rig.store.claims()) == claims
    writer.close()
    await rig.quiet()
    await until_metric(rig, "midstream_gateway_live_requests 0.0")


async def until_metric(rig: Rig, line: str) -> None:
    async def is_there() -> bool:
        return await rig.metric(line)

    await until(is_there)
