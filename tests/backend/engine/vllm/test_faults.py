"""Whatever goes wrong while a request moves between two real engines: one owner, a right stream or a proper error, and all memory back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from migration.leg import Leg
from tests.backend.engine.vllm.fleet import MODEL, PACE_S, QUIET_S, Answer, Fleet, Instance

pytest.importorskip("vllm", reason="the light environment has no vllm")

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LEAVES_WITHIN_S = 1.0


def completion(**fields: Any) -> dict[str, Any]:
    prompt = [4000 + 11 * position for position in range(100)]
    return {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True, **fields}


async def stays_right(fleet: Fleet, body: dict[str, Any], move_at: int = 20, mode: str = "live") -> Answer:
    """An attempt to move that must not be seen by the client; the answer, equal to one that nobody tried to move."""
    unmoved = await fleet.ask("/v1/completions", body)
    tried = await fleet.ask("/v1/completions", body, move_at=(move_at,), mode=mode)
    assert tried.status == 200
    assert tried.comparable == unmoved.comparable
    assert tried.outcome is not None
    return tried


async def until(condition: Any, seconds: float = QUIET_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def filled(fleet: Fleet, instance: Instance, prompts: list[int], max_tokens: int, *, frozen: bool = False) -> AsyncIterator[None]:
    """The instance holds requests with prompts of these lengths while it lasts: decoding, or frozen and so as they are."""

    async def one(number: int, tokens: int) -> None:
        body = completion(
            prompt=[100 + number * 1500 + i for i in range(tokens)], max_tokens=max_tokens, model=MODEL, cache_salt=f"fill{number}"
        )
        # Who is to be frozen must not run on for long before it is: its answer would take memory that the test counts on.
        headers = {"x-midstream-request": f"fill-{fleet.next_request(PACE_S if frozen else 0)}"}
        async with fleet.client.stream("POST", f"{instance.url}/v1/completions", json=body, headers=headers) as response:
            async for _ in response.aiter_raw():
                pass

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number, tokens)) for number, tokens in enumerate(prompts)]
        await until(lambda: instance.engine.load().running == len(prompts) and all(flight.history for flight in instance.flights()))
        if frozen:
            for flight in instance.flights():
                await instance.engine.freeze(flight.leg)
        yield
        for task in tasks:
            task.cancel()


async def test_no_memory_at_the_destination(fleet: Fleet) -> None:
    before = await fleet.settle()
    body = completion()
    unmoved = await fleet.ask("/v1/completions", body)
    # Twenty tokens each before any of them takes another block; until then one block is free, and the request needs two.
    async with filled(fleet, fleet.b, [940, 940, 940, 940, 170], max_tokens=60, frozen=True):
        answer = await fleet.ask("/v1/completions", body, at=fleet.a, move_at=(10,))
    assert answer.comparable == unmoved.comparable
    assert answer.instance == fleet.a.id
    assert answer.outcome is not None
    assert answer.outcome["outcome"] == "no_memory"
    assert await fleet.settle() == before


async def test_the_source_finishes_first(fleet: Fleet) -> None:
    before = await fleet.settle()
    with fleet.a.freezing_at(500), fleet.b.freezing_at(500):
        tried = await stays_right(fleet, completion())
    assert tried.outcome is not None
    assert tried.outcome["outcome"] == "request_ended"
    assert await fleet.settle() == before


async def test_the_source_preempts_in_mid_copy(fleet: Fleet) -> None:
    before = await fleet.settle()
    known = fleet.a.engine.load().preemptions

    async def wait_preempted(leg: Leg, transfer: int) -> None:
        await until(lambda: fleet.a.engine.load().preemptions > known)

    async with filled(fleet, fleet.a, [840] * 4, max_tokens=170):
        with fleet.a.sending(wait_preempted):
            body = completion(prompt=list(range(9000, 9300)), max_tokens=200)
            answer = await fleet.ask("/v1/completions", body, at=fleet.a, move_at=(5,))
    ids = [token for chunk in answer.chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
    assert len(ids) == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.outcome is not None
    assert answer.outcome["outcome"] == "preempted"
    assert await fleet.settle() == before


@pytest.mark.parametrize("moment", ["copying", "frozen"])
async def test_the_client_leaves(fleet: Fleet, moment: str) -> None:
    """Both engines are free again within a second."""
    before = await fleet.settle()
    reached, never = asyncio.Event(), asyncio.Event()

    async def hold(leg: Leg, transfer: int) -> None:
        reached.set()
        await never.wait()

    body = completion(max_tokens=900)
    if moment == "copying":
        with fleet.a.sending(hold), fleet.b.sending(hold):
            await leave_once(fleet, body, reached)
    else:
        for instance in (fleet.a, fleet.b):
            instance.mail.hold["commit"] = never
        try:
            await leave_once(fleet, body, reached)
        finally:
            never.set()
            for instance in (fleet.a, fleet.b):
                instance.mail.hold.clear()
    assert await fleet.settle() == before


async def leave_once(fleet: Fleet, body: dict[str, Any], reached: asyncio.Event) -> None:
    """Start a stream, order a move, close the stream once `reached` is set (or a commit is held); wait until nothing runs."""
    request = fleet.next_request(PACE_S)
    async with asyncio.TaskGroup() as group:
        async with fleet.client.stream(
            "POST",
            f"{fleet.gateway}/v1/completions",
            json={"model": MODEL, "cache_salt": request, **body},
            headers={"x-request-id": request},
        ) as response:
            assert response.status_code == 200
            flight = await fleet.flight_of(request)
            await flight.wait_history(10)
            order = group.create_task(fleet.move(request))
            await until(lambda: reached.is_set() or order.done() or any(mail.held for mail in (fleet.a.mail, fleet.b.mail)))
            assert not order.done(), order.result()
        async with asyncio.timeout(LEAVES_WITHIN_S):
            while any(instance.engine.load().running or instance.flights() for instance in (fleet.a, fleet.b)):
                await asyncio.sleep(0.002)
        outcome = await order
        assert outcome["outcome"] != "moved"


@pytest.mark.parametrize("lost", ["commit", "prepare", "reserve"])
async def test_a_lost_answer(fleet: Fleet, lost: str) -> None:
    """A lost Committed is resolved by asking; a lost Prepared or Reserved leaves the request where it is."""
    before = await fleet.settle()
    for instance in (fleet.a, fleet.b):
        instance.mail.lose_answers_to[lost] = 1
    try:
        tried = await stays_right(fleet, completion(max_tokens=300))
    finally:
        for instance in (fleet.a, fleet.b):
            instance.mail.lose_answers_to.clear()
    assert tried.outcome is not None
    assert (tried.outcome["outcome"] == "moved") == (lost == "commit"), tried.outcome
    assert await fleet.settle() == before


async def test_after_a_failure_the_next_move_works(fleet: Fleet) -> None:
    for instance in (fleet.a, fleet.b):
        instance.mail.lose_answers_to["reserve"] = 1
    await fleet.ask("/v1/completions", completion(max_tokens=300), move_at=(20,))
    for instance in (fleet.a, fleet.b):
        instance.mail.lose_answers_to.clear()
    await fleet.settle()
    assert (await stays_right(fleet, completion(max_tokens=300))).outcome["outcome"] == "moved"  # type: ignore[index]  # not None, see above


@pytest.mark.parametrize(
    ("fields", "reason"), [({"n": 2, "temperature": 1.0, "seed": 3}, "n"), ({"prompt": [[1, 2, 3], [4, 5, 6]]}, "prompts")]
)
async def test_what_cannot_move_is_served_and_counted(fleet: Fleet, fields: dict[str, Any], reason: str) -> None:
    before = await fleet.settle()
    answer = await fleet.ask("/v1/completions", completion(**fields), move_at=(20,))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    indices = {choice["index"] for chunk in answer.chunks for choice in chunk["choices"]}
    assert indices == {0, 1}
    assert answer.outcome is not None
    assert answer.outcome["outcome"] == reason
    counts = [(await fleet.client.get(f"{instance.url}/midstream/metrics")).text for instance in (fleet.a, fleet.b)]
    assert any(f'reason="{reason}"' in text for text in counts)
    assert await fleet.settle() == before
