"""An answer whose instance is gone goes on at another one, and what the client gets is, byte for byte, the undisturbed answer."""

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from migration.leg import InstanceId
from tests.backend.registry.reports import a_report
from tests.gateway.conftest import Rig, make_rig, report, until
from tests.gateway.scripted import SSE, Exchange, Script, ScriptedBackend, answer_event, chunk, control, event, moving, shown, told

EVENTS = told()
RESUME = "/midstream/resume"


def dies(*events: bytes, end: str = "cut") -> Script:
    """Tells these and then is gone."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*events)
        if end == "cut":
            exchange.cut()
        elif end == "in_event":
            await exchange.send(b"id: 99.0;1\ndata: half an ev")
            exchange.cut()
        else:
            if end != "end":
                await exchange.send(control(kind=end, reason="draining"))
            await exchange.end()

    return script


def tells(*events: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.stream(*events)

    return script


def order(exchange: Exchange) -> dict[str, object]:
    asked: dict[str, object] = json.loads(exchange.body)
    return asked


@pytest.mark.parametrize("end", ["cut", "in_event", "end", "lost", "released"])
@pytest.mark.parametrize("at", range(1, len(EVENTS)))
async def test_resumed_at_every_event(rig: Rig, at: int, end: str) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = dies(*EVENTS[:at], end=end)
    for one in (first, second):  # an instance that merely lost the request may get it back
        one.others[RESUME] = tells(*EVENTS)
    response = await rig.ask(headers={"x-request-id": "r1"})
    assert response.content == shown(EVENTS)
    (asked,) = [seen for one in (first, second) for seen in one.asked(RESUME)]
    tokens = min(max(at - 1, 1), 9)
    known = order(asked)
    assert known["tokens"] == [101 + n for n in range(tokens)]
    assert (known["request"], known["epoch"], known["tier"], known["created"]) == ("r1", 1000, "normal", 1)
    assert ["x-midstream-epoch", "1000"] in known["http"]["headers"]  # type: ignore[index]
    assert base64.b64decode(known["http"]["body"]) == first.seen[0].body  # type: ignore[index]
    assert known["http"]["path"] == "/v1/chat/completions"  # type: ignore[index]
    await rig.quiet()
    reason = "instance_lost"
    assert await rig.metric(f'midstream_gateway_resumes_total{{outcome="resumed",reason="{reason}"}} 1.0')
    assert await rig.metric("midstream_gateway_remembered_tokens 0.0")


async def test_the_instance_that_died_is_not_asked_again_and_the_claim_follows(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    resumed, go_on = asyncio.Event(), asyncio.Event()
    first.script = dies(*EVENTS[:4])

    async def holds(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:6])
        resumed.set()
        await go_on.wait()
        await exchange.send(*EVENTS[6:])
        await exchange.end()

    second.others[RESUME] = holds
    async with rig.reading() as response:
        async with asyncio.timeout(5):
            await resumed.wait()
        assert [claim.instance for claim in await rig.store.claims()] == ["b"]
        go_on.set()
        content = b"".join([part async for part in response.aiter_raw()])
    assert content == shown(EVENTS)
    assert not first.asked(RESUME)
    await rig.quiet()


async def test_an_answer_under_way_does_not_stand_in_line() -> None:
    """A newcomer would wait: there is no room anywhere. Whoever reads already goes on."""
    async with make_rig(view_max_age_s=0) as rig:
        first, second = await rig.add("a"), await rig.add("b", running=5)
        full = replace(report("b", second.url, running=5), free_tokens=0, waiting=3, waiting_tokens=900, sequence=2)

        async def fills_up_and_dies(exchange: Exchange) -> None:
            await rig.store.withdraw(InstanceId("a"))
            await rig.store.publish(full, 1000)
            await dies(*EVENTS[:4])(exchange)

        first.script = fills_up_and_dies
        second.others[RESUME] = tells(*EVENTS)
        async with asyncio.timeout(5):
            response = await rig.ask()
        assert response.content == shown(EVENTS)
        await rig.quiet()


async def test_one_death_after_the_other(rig: Rig) -> None:
    backends = [await rig.add(name, running=load) for name, load in (("a", 0), ("b", 5), ("c", 9))]
    backends[0].script = dies(*EVENTS[:3])
    backends[1].others[RESUME] = dies(*EVENTS[:6])
    backends[2].others[RESUME] = tells(*EVENTS)
    assert (await rig.ask()).content == shown(EVENTS)
    orders = [order(seen) for one in backends for seen in one.asked(RESUME)]
    assert [asked["epoch"] for asked in orders] == [1000, 2000]
    assert [len(asked["tokens"]) for asked in orders] == [2, 5]  # type: ignore[arg-type]
    await rig.quiet()


@pytest.mark.parametrize("at", [0, 2])
async def test_a_death_while_it_is_being_resumed(rig: Rig, at: int) -> None:
    """Nothing new has come from the second one: the third is asked with the same tokens."""
    backends = [await rig.add(name, running=load) for name, load in (("a", 0), ("b", 5), ("c", 9))]
    backends[0].script = dies(*EVENTS[:4])
    backends[1].others[RESUME] = dies(*EVENTS[:at])
    backends[2].others[RESUME] = tells(*EVENTS)
    assert (await rig.ask()).content == shown(EVENTS)
    await rig.quiet()


async def test_an_answer_under_way_waits_for_an_instance() -> None:
    async with make_rig(resume_wait_s=5) as rig:
        (await rig.add("a")).script = dies(*EVENTS[:4])
        async with rig.reading() as response:
            parts = response.aiter_raw()
            content = await anext(parts)
            (await rig.add("b")).others[RESUME] = tells(*EVENTS)
            content += b"".join([part async for part in parts])
        assert content == shown(EVENTS)


async def test_an_answer_that_begins_anew_waits_for_an_instance_too() -> None:
    async with make_rig(resume_wait_s=5) as rig:
        (await rig.add("a")).script = dies(*progress((7, 8)))
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(rig.ask(stream=False, logprobs=True))
            await until(lambda: bool(rig.backends[0].seen))
            (await rig.add("b", running=5)).script = tells(*progress((7, 8, 9)), answer_event(b'{"x":1}'))
        assert answering.result().content == b'{"x":1}'


async def test_an_instance_that_was_started_anew_is_asked(rig: Rig) -> None:
    backend = await rig.add("a")

    async def restarts(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:4])
        exchange.cut()
        await rig.store.publish(a_report("a", url=backend.url, models=("m",), incarnation="later"), 1000)

    backend.script = restarts
    backend.others[RESUME] = tells(*EVENTS)
    async with make_rig(rig.store, resume_wait_s=5) as patient:
        assert (await patient.ask()).content == shown(EVENTS)


async def test_what_a_resumed_stream_says_otherwise_is_not_shown(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = dies(*EVENTS[:4])
    second.others[RESUME] = tells(*EVENTS[:3], *EVENTS[6:])
    content = (await rig.ask()).content
    assert content.startswith(shown(EVENTS[:4]))
    error, done = content.removeprefix(shown(EVENTS[:4])).split(b"\n\n")[:2]
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "instance_lost"
    assert done == b"data: [DONE]"
    await rig.quiet()


async def test_nobody_is_left(rig: Rig) -> None:
    (await rig.add("a")).script = dies(*EVENTS[:4])
    content = (await rig.ask()).content
    assert content.startswith(shown(EVENTS[:4]))
    assert content.endswith(b'"code": "instance_lost"}}\n\ndata: [DONE]\n\n')
    assert await rig.metric('midstream_gateway_resumes_total{outcome="failed",reason="no_instance"} 1.0')
    await rig.quiet()


@pytest.mark.parametrize(("status", "body"), [(404, b'{"error":{"message":"no such route"}}'), (503, b'{"error":{"message":"draining"}}')])
async def test_an_instance_that_does_not_resume_is_passed_over(rig: Rig, status: int, body: bytes) -> None:
    backends = [await rig.add(name, running=load) for name, load in (("a", 0), ("b", 5), ("c", 9))]
    backends[0].script = dies(*EVENTS[:4])

    async def refuses(exchange: Exchange) -> None:
        await exchange.answer(status, body)

    backends[1].others[RESUME] = refuses
    backends[2].others[RESUME] = tells(*EVENTS)
    assert (await rig.ask()).content == shown(EVENTS)
    assert len(backends[1].asked(RESUME)) == 1
    await rig.quiet()


def progress(tokens: Sequence[int], first: int = 1) -> list[bytes]:
    return [event(n, 0, (token,), b"\n") for n, token in enumerate(tokens, start=first)]


async def test_an_answer_that_streams_nothing_is_resumed(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = dies(*progress((7, 8)))
    second.others[RESUME] = tells(*progress((7, 8, 9)), answer_event(b'{"x":1}'))
    response = await rig.ask(stream=False)
    assert (response.status_code, response.content) == (200, b'{"x":1}')
    (asked,) = second.asked(RESUME)
    assert (order(asked)["tokens"], order(asked)["created"]) == ([7, 8], None)
    assert await rig.metric('midstream_gateway_resumes_total{outcome="resumed",reason="instance_lost"} 1.0')
    await rig.quiet()


async def test_an_engine_that_fails_in_the_middle_of_an_answer_that_streams_nothing(rig: Rig) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = tells(*progress((7, 8)), answer_event(b'{"error":{"message":"engine dead"}}', 500))
    second.others[RESUME] = tells(*progress((7, 8, 9)), answer_event(b'{"x":1}'))
    assert (await rig.ask(stream=False)).content == b'{"x":1}'
    assert await rig.metric('midstream_gateway_resumes_total{outcome="resumed",reason="instance_refused"} 1.0')
    await rig.quiet()


@pytest.mark.parametrize(("fields", "reason"), [({"logprobs": True}, "logprobs"), ({"n": 2}, "n")])
async def test_an_answer_that_streams_nothing_and_cannot_be_resumed_begins_anew(rig: Rig, fields: dict[str, Any], reason: str) -> None:
    first, second = await rig.add("a"), await rig.add("b", running=5)
    first.script = dies(*progress((7, 8)))
    second.script = tells(*progress((7, 8, 9)), answer_event(b'{"x":1}'))
    assert (await rig.ask(stream=False, **fields)).content == b'{"x":1}'
    assert second.seen[0].headers["x-midstream-epoch"] == "1000"
    assert await rig.metric(f'midstream_gateway_resumes_total{{outcome="refused",reason="{reason}"}} 1.0')
    await rig.quiet()


async def no_cursor(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.send(chunk("Once"))
    exchange.cut()


@pytest.mark.parametrize(
    ("settings", "fields", "script", "reason"),
    [
        ({}, {"n": 2}, dies(*EVENTS[:4]), "n"),
        ({}, {"prompt": ["a", "b"]}, dies(*EVENTS[:4]), "prompts"),
        ({}, {}, no_cursor, "ids_unknown"),
        ({"max_remembered_request_tokens": 2}, {}, dies(*EVENTS[:5]), "memory"),
        ({"max_remembered_tokens": 2}, {}, dies(*EVENTS[:5]), "memory"),
        ({"max_resumes": 0}, {}, dies(*EVENTS[:4]), "too_often"),
    ],
)
async def test_a_stream_that_cannot_be_resumed_ends_honestly(
    settings: dict[str, Any], fields: dict[str, Any], script: Script, reason: str
) -> None:
    async with make_rig(**settings) as rig:
        first, second = await rig.add("a"), await rig.add("b", running=5)
        first.script = script
        content = (await rig.ask(**fields)).content
        assert content.endswith(b'"code": "instance_lost"}}\n\ndata: [DONE]\n\n')
        assert not second.seen
        assert await rig.metric(f'midstream_gateway_resumes_total{{outcome="refused",reason="{reason}"}} 1.0')
        assert await rig.metric("midstream_gateway_remembered_tokens 0.0")
        await rig.quiet()


async def test_a_move_whose_source_dies_is_resumed_at_its_destination(rig: Rig) -> None:
    """The destination had not become the owner: it says `lost` to the attachment, and takes the request as a resumed one."""
    source, destination = await rig.add("a"), await rig.add("b", running=5)

    async def leaves(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*EVENTS[:3], moving(1, destination), *EVENTS[3:5])
        await until(lambda: bool(destination.asked("/midstream/streams/")))
        exchange.cut()

    source.script = leaves
    head = control(kind="head", status=200, headers=SSE)
    destination.others["/midstream/streams/"] = tells(head, *EVENTS[:3], control(kind="lost", reason="dropped"))
    destination.others[RESUME] = tells(*EVENTS)
    assert (await rig.ask()).content == shown(EVENTS)
    assert order(destination.asked(RESUME)[0])["epoch"] == 1000
    await rig.quiet()


async def hangs_after(exchange: Exchange, *events: bytes) -> None:
    if events:
        await exchange.head()
        await exchange.send(*events)
    await exchange.wait_left()


@pytest.mark.parametrize("at", [0, 4], ids=["before_the_head", "in_mid_answer"])
async def test_an_instance_that_hangs_and_reports_no_more_counts_as_dead(at: int) -> None:
    async with make_rig(hang_timeout_s=0.1, report_stale_s=0.3) as rig:
        first, second = await rig.add("a"), await rig.add("b", running=5)
        first.script = lambda exchange: hangs_after(exchange, *EVENTS[:at])
        second.others[RESUME] = second.script = tells(*EVENTS)
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(_keep_reporting(rig, second))
            assert (await rig.ask()).content == shown(EVENTS)
            reporting.cancel()
        await rig.quiet()


async def test_an_instance_that_is_silent_and_reports_does_not() -> None:
    async with make_rig(hang_timeout_s=0.05, report_stale_s=0.3) as rig:
        first, second = await rig.add("a"), await rig.add("b", running=5)
        go_on = asyncio.Event()

        async def pauses(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.send(*EVENTS[:4])
            await go_on.wait()
            await exchange.send(*EVENTS[4:])
            await exchange.end()

        first.script = pauses
        async with asyncio.TaskGroup() as tasks:
            reporting = [tasks.create_task(_keep_reporting(rig, one)) for one in (first, second)]
            answering = tasks.create_task(rig.ask())
            await asyncio.sleep(0.8)  # many times the patience
            go_on.set()
            assert (await answering).content == shown(EVENTS)
            for task in reporting:
                task.cancel()
        assert not second.seen
        await rig.quiet()


async def _keep_reporting(rig: Rig, backend: ScriptedBackend) -> None:
    running = {"a": 0, "b": 5}[backend.id]
    while True:
        await rig.store.publish(report(backend.id, backend.url, running=running), 1000)
        await asyncio.sleep(0.03)
