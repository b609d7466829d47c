"""A stream that goes on at another instance is, byte for byte, the stream of a request that stayed."""

import asyncio
import json

import pytest

from backend.registry.memory import MemoryStore
from migration.leg import Leg, RequestId
from tests.gateway.conftest import Rig, make_rig, until
from tests.gateway.scripted import (
    Exchange,
    Script,
    ScriptedBackend,
    answer_event,
    control,
    event,
    head_of_attachment,
    moving,
    shown,
    told,
)

EVENTS = told()
STREAMS = "/midstream/streams/"


def attached(*events: bytes) -> Script:
    """An instance that tells everything, then ends."""

    async def script(exchange: Exchange) -> None:
        await exchange.stream(head_of_attachment(), *events)

    return script


def leaves(events: list[bytes], to: ScriptedBackend, end: str = "moved") -> Script:
    """An instance that tells some events, announces a move after the first half of them, and ends in the given way."""

    async def script(exchange: Exchange) -> None:
        half = len(events) // 2
        await exchange.head()
        await exchange.send(*events[:half], moving(1, to), *events[half:])
        await until(lambda: bool(to.asked(STREAMS)))
        if end == "moved":
            await exchange.send(control(kind="moved", epoch=1))
            await exchange.end()
        elif end == "lost":
            await exchange.send(control(kind="lost", reason="silent"))
            await exchange.end()
        elif end == "end":
            await exchange.end()
        elif end == "cut":
            exchange.cut()
        elif end == "cut_inside_event":
            await exchange.send(b"id: 99.0;1\ndata: half an ev")
            exchange.cut()

    return script


@pytest.mark.parametrize("end", ["moved", "lost", "end", "cut", "cut_inside_event"])
@pytest.mark.parametrize("at", range(len(EVENTS)))
async def test_move_at_every_event(rig: Rig, at: int, end: str) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(EVENTS[:at], destination, end)
    destination.others[STREAMS] = attached(*EVENTS)
    response = await rig.ask(headers={"x-request-id": "r1"})
    assert response.content == shown(EVENTS)
    (attach,) = destination.asked(STREAMS)
    assert (attach.method, attach.target) == ("GET", "/midstream/streams/r1?epoch=1")
    assert len(source.seen) == 1
    await rig.quiet()
    assert await rig.metric("midstream_gateway_switches_total 1.0")
    gap_ms = await rig.store.switch_gap_ms(Leg(RequestId("r1"), 1))
    assert gap_ms is not None
    assert 0 <= gap_ms < 5000


@pytest.mark.parametrize("size", [1, 5, 50])
async def test_move_with_small_packets_on_both_sides(rig: Rig, size: int) -> None:
    """Cursors, control events and UTF-8 characters are cut anywhere."""
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    def cut_up(data: bytes) -> list[bytes]:
        return [data[at : at + size] for at in range(0, len(data), size)]

    async def leave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*cut_up(b"".join(EVENTS[:3]) + moving(1, destination) + b"".join(EVENTS[3:6]) + control(kind="moved", epoch=1)))
        await exchange.end()

    source.script = leave
    destination.others[STREAMS] = attached(*cut_up(b"".join(EVENTS)))
    assert (await rig.ask()).content == shown(EVENTS)
    await rig.quiet()


async def test_everything_in_one_packet(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def leave(exchange: Exchange) -> None:
        await exchange.stream(b"".join(EVENTS[:5]) + moving(1, destination) + EVENTS[5] + control(kind="moved", epoch=1))

    source.script = leave
    destination.others[STREAMS] = attached(b"".join(EVENTS))
    assert (await rig.ask()).content == shown(EVENTS)


async def test_there_and_back_again(rig: Rig) -> None:
    """A -> B -> A -> B, with the claim following."""
    first, second = await rig.add("a"), await rig.add("b", running=1)
    arrived, go_on = asyncio.Event(), asyncio.Event()

    def hop(upto: int, epoch: int, to: ScriptedBackend, *, wait: bool = False) -> Script:
        async def script(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*([head_of_attachment()] if epoch > 1 else []), *EVENTS[:upto])
            if wait:
                arrived.set()
                await go_on.wait()
            await exchange.send(moving(epoch, to))
            await until(lambda: any(f"epoch={epoch}" in seen.target for seen in to.seen))
            await exchange.send(control(kind="moved", epoch=epoch))
            await exchange.end()

        return script

    first.script = hop(3, 1, second)
    second.others["/midstream/streams/r?epoch=1"] = hop(6, 2, first, wait=True)
    first.others["/midstream/streams/r?epoch=2"] = hop(8, 3, second)
    second.others["/midstream/streams/r?epoch=3"] = attached(*EVENTS)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.ask(headers={"x-request-id": "r"}))
        await arrived.wait()

        async def claimed_at_b() -> bool:
            return [claim.instance for claim in await rig.store.claims()] == ["b"]

        await until(claimed_at_b)
        go_on.set()
    assert asked.result().content == shown(EVENTS)
    await rig.quiet()


async def test_kept_drops_the_attachment_and_goes_on(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def stay(exchange: Exchange) -> None:
        await exchange.head()
        for epoch in (1, 2):
            await exchange.send(EVENTS[epoch - 1], moving(epoch, destination))
            await until(lambda: destination.open == 1)
            await exchange.send(control(kind="kept", epoch=epoch))
            await until(lambda: destination.open == 0)
        await exchange.send(*EVENTS[2:])
        await exchange.end()

    async def hold(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.wait_left()

    source.script = stay
    destination.others[STREAMS] = hold
    assert (await rig.ask()).content == shown(EVENTS)
    await rig.quiet()


async def test_attachment_refused_at_first(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(EVENTS[:6], destination)

    async def refuse_twice(exchange: Exchange) -> None:
        if len(destination.asked(STREAMS)) < 3:
            await exchange.answer(404, b"{}")
        else:
            await attached(*EVENTS)(exchange)

    destination.others[STREAMS] = refuse_twice
    assert (await rig.ask()).content == shown(EVENTS)


async def test_attachment_that_answers_only_after_the_move(rig: Rig) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    moved = asyncio.Event()

    async def leave(exchange: Exchange) -> None:
        await leaves(EVENTS[:6], destination)(exchange)
        moved.set()

    async def late(exchange: Exchange) -> None:
        await moved.wait()
        await attached(*EVENTS)(exchange)

    source.script = leave
    destination.others[STREAMS] = late
    assert (await rig.ask()).content == shown(EVENTS)


@pytest.mark.parametrize(
    "events", [EVENTS[:2] + EVENTS[6:], [EVENTS[0], b"data: no cursor\n\n"], [EVENTS[0], event(7, 1, (), b"data: x\n\n")]]
)
async def test_gap_is_a_failure_and_nothing_wrong_is_shown(rig: Rig, events: list[bytes]) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(EVENTS[:5], destination)
    destination.others[STREAMS] = attached(*events)
    content = (await rig.ask()).content
    assert content.startswith(shown(EVENTS[:5]))
    tail = content.removeprefix(shown(EVENTS[:5]))
    error, done, nothing = tail.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stream_gap"
    assert (done, nothing) == (b"data: [DONE]", b"")
    await rig.quiet()


async def dead(exchange: Exchange) -> None:
    exchange.cut()


async def unknown(exchange: Exchange) -> None:
    await exchange.answer(404, b"{}")


async def dies_while_telling(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(head_of_attachment(), *EVENTS[:6])
    exchange.cut()


@pytest.mark.parametrize("script", [dead, unknown, dies_while_telling])
async def test_both_sides_die(script: Script) -> None:
    async with make_rig(attach_timeout_s=0.2) as rig:
        source, destination = await rig.add("a"), await rig.add("b", running=1)
        source.script = leaves(EVENTS[:5], destination, "cut")
        destination.others[STREAMS] = script
        content = (await rig.ask()).content
        assert content.startswith(shown(EVENTS[:5]))
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
        assert b'"code": "instance_lost"' in content
        await rig.quiet()


async def test_moved_without_announcement_is_a_failure(rig: Rig) -> None:
    source = await rig.add("a")

    async def leave(exchange: Exchange) -> None:
        await exchange.stream(*EVENTS[:4], control(kind="moved", epoch=1))

    source.script = leave
    content = (await rig.ask()).content
    assert content.startswith(shown(EVENTS[:4]))
    assert b"not announced" in content


@pytest.mark.parametrize("broken", [b"event: midstream\ndata: {nope\n\n", control(kind="teleported")])
async def test_malformed_control_event_after_client_events_loses_none_of_them(rig: Rig, broken: bytes) -> None:
    source, destination = await rig.add("a"), await rig.add("b", running=1)

    async def leave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(EVENTS[0] + moving(1, destination) + EVENTS[1] + EVENTS[2] + broken)
        await exchange.wait_left()

    source.script = leave
    destination.others[STREAMS] = attached(*EVENTS)
    assert (await rig.ask()).content == shown(EVENTS)


async def test_request_moves_before_its_first_token(rig: Rig) -> None:
    """The head of the answer comes from where it is answered."""
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves([], destination)
    destination.others[STREAMS] = attached(*EVENTS)
    response = await rig.ask()
    assert response.content == shown(EVENTS)
    assert response.headers["x-midstream-instance"] == "b"
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("end", ["moved", "cut"])
async def test_plain_request_moves(rig: Rig, end: str) -> None:
    progress = [event(n, 0, (n,), b"\n") for n in range(1, 8)]
    source, destination = await rig.add("a"), await rig.add("b", running=1)
    source.script = leaves(progress[:4], destination, end)
    destination.others[STREAMS] = attached(*progress, answer_event(b'{"whole":true}'))
    response = await rig.ask(stream=False, headers={"x-request-id": "p"})
    assert (response.status_code, response.content) == (200, b'{"whole":true}')
    assert response.headers["x-midstream-instance"] == "b"
    await rig.quiet()
    assert await rig.store.switch_gap_ms(Leg(RequestId("p"), 1)) is not None


async def test_two_gateways_see_one_claim() -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    async with make_rig(store) as one, make_rig(store) as two:
        source, destination = await one.add("a"), await one.add("b", running=1)
        moved = asyncio.Event()

        async def hold(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(head_of_attachment(), *EVENTS[:8])
            moved.set()
            await exchange.wait_left()

        source.script = leaves(EVENTS[:4], destination)
        destination.others[STREAMS] = hold
        async with one.reading() as response:
            parts = response.aiter_raw()
            await anext(parts)
            await moved.wait()

            async def counted_at_b() -> bool:
                rows = (await two.client.get("/admin/instances")).json()["instances"]
                return {row["id"]: row["claims"] for row in rows} == {"a": 0, "b": 1}

            await until(counted_at_b)
        await one.quiet()
