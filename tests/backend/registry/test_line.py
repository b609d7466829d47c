"""One suite for both stores: what backend/registry/line.py guarantees."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from redis import Redis

from backend.registry.line import Bell, LineLimits, LineSight, Passage, Ticket
from backend.registry.redis import RedisStore
from backend.registry.store import Candidate, Claim, InstanceStore, StoreError
from migration.leg import InstanceId, RequestId
from tests.backend.registry.reports import a_report

I1, I2 = InstanceId("i1"), InstanceId("i2")
FREE = LineLimits(None, 1000)
QUIET_S = 0.1
"""Long enough for a message that should not come."""


def ticket(name: str, tier: str = "normal", rank: int = 1, line: str = "m", gateway: str = "g1") -> Ticket:
    return Ticket(RequestId(name), line, gateway, tier, rank, 10, (I2,))


def claim(name: str) -> Claim:
    return Claim(RequestId(name), I1, "g1", "normal", 10)


async def names(store: InstanceStore, line: str = "m") -> list[str]:
    return [standing.ticket.request for standing in (await store.line.look(line, 100)).standings]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.005)


async def join(store: InstanceStore, *tickets: Ticket, limits: LineLimits = FREE, ttl_s: float = 60) -> list[bool]:
    return [await store.line.join(each, limits, ttl_s) for each in tickets]


async def test_the_line_is_ordered_by_rank_then_arrival(store: InstanceStore) -> None:
    await join(store, ticket("b1", "batch", 2), ticket("n2"), ticket("n1"), ticket("h1", "high", 0), ticket("other", line="x"))
    sight = await store.line.look("m", 3)
    assert [standing.ticket for standing in sight.standings] == [ticket("h1", "high", 0), ticket("n2"), ticket("n1")]
    assert all(0 <= standing.waited_s < 10 for standing in sight.standings)
    assert (sight.waiting, sight.ahead, sight.bound, sight.shed) == ({"high": 1, "normal": 2, "batch": 1}, 0, 0, frozenset())
    assert await names(store, "x") == ["other"]
    assert (await store.line.look("m", 0)).standings == []


async def test_who_ran_before_is_known_as_such(store: InstanceStore) -> None:
    await join(store, ticket("new"), replace(ticket("preempted"), again=True))
    assert [standing.ticket.again for standing in (await store.line.look("m", 9)).standings] == [False, True]


async def test_who_joins_again_keeps_the_place(store: InstanceStore) -> None:
    await join(store, ticket("a"), ticket("b"), ticket("a"))
    assert await names(store) == ["a", "b"]
    assert (await store.line.look("m", 9)).waiting == {"normal": 2}


async def test_leaving_is_once(store: InstanceStore) -> None:
    await join(store, ticket("a"), ticket("b"))
    assert await store.line.leave(RequestId("a"))
    assert not await store.line.leave(RequestId("a"))
    assert await names(store) == ["b"]
    assert (await store.line.look("m", 9)).waiting == {"normal": 1}


async def test_places_expire_unless_renewed(store: InstanceStore) -> None:
    await join(store, ticket("gone"), ttl_s=0.03)
    await join(store, ticket("kept"), ttl_s=0.03)
    assert list(await store.line.renew([RequestId("kept"), RequestId("never")], 60)) == ["never"]

    async def one_left() -> bool:
        return await names(store) == ["kept"]

    await until(one_left)
    assert list(await store.line.renew([RequestId("gone")], 60)) == ["gone"]
    assert list(await store.line.renew([], 60)) == []
    assert (await store.line.look("m", 9)).waiting == {"normal": 1}


async def test_a_claim_ends_the_place(store: InstanceStore) -> None:
    await join(store, ticket("a"), ticket("b"))
    assert await store.claim(claim("b"), [Candidate(I1, 0)], 60, Passage("m", 1)) == I1
    sight = await store.line.look("m", 9)
    assert ([standing.ticket.request for standing in sight.standings], sight.bound, sight.waiting) == (["a"], 1, {"normal": 1})
    assert await store.claim(claim("a"), [Candidate(I1, 0)], 60, Passage("m", 1)) is None
    assert await names(store) == ["a"]


async def test_a_newcomer_does_not_pass_its_own_rank_or_a_better_one(store: InstanceStore) -> None:
    await join(store, ticket("a", "normal", 1))
    assert await store.claim(claim("batch"), [Candidate(I1, 0)], 60, Passage("m", 2)) is None
    assert await store.claim(claim("normal"), [Candidate(I1, 0)], 60, Passage("m", 1)) is None
    assert await store.claim(claim("high"), [Candidate(I1, 0)], 60, Passage("m", 0)) == I1
    assert await store.claim(claim("elsewhere"), [Candidate(I1, 1)], 60, Passage("x", 1)) == I1
    assert await store.claim(claim("restored"), [Candidate(I1, 2)], 60) == I1


@pytest.mark.parametrize("ending", ["started", "released", "moved"])
async def test_who_is_bound_ahead_counts_until_it_starts(store: InstanceStore, ending: str) -> None:
    await join(store, ticket("a"))
    assert await store.claim(claim("a"), [Candidate(I1, 0)], 60, Passage("m", 1, ahead=True)) == I1
    assert (await store.line.look("m", 9)).ahead == 1
    assert (await store.line.look("x", 9)).ahead == 0
    match ending:
        case "started":
            assert await store.line.started(RequestId("a"))
            assert not await store.line.started(RequestId("a"))
        case "released":
            await store.release(RequestId("a"))
        case "moved":
            await store.move_claim(RequestId("a"), I2)
    assert (await store.line.look("m", 9)).ahead == 0


async def test_a_claim_ahead_that_expires_does_not_count(store: InstanceStore) -> None:
    await store.claim(claim("a"), [Candidate(I1, 0)], 0.03, Passage("m", 1, ahead=True))

    async def forgotten() -> bool:
        return (await store.line.look("m", 9)).ahead == 0

    await until(forgotten)


async def test_a_full_tier_and_a_full_line_take_nobody(store: InstanceStore) -> None:
    assert await join(store, ticket("a"), ticket("b"), limits=LineLimits(1, 9)) == [True, False]
    assert await join(store, ticket("a"), limits=LineLimits(1, 9)) == [True]
    assert await join(store, ticket("h", "high", 0), limits=LineLimits(1, 9)) == [True]
    assert await join(store, ticket("c"), ticket("d"), limits=LineLimits(None, 3)) == [True, False]
    assert await join(store, ticket("x", line="x"), limits=LineLimits(1, 3)) == [True]


async def test_the_last_of_the_first_tier_there_is_makes_room(store: InstanceStore) -> None:
    await join(store, ticket("n"), ticket("b1", "batch", 2), ticket("b2", "batch", 2), ticket("f", "free", 3))
    full = LineLimits(None, 4, ("spare", "batch", "normal"))
    assert await join(store, ticket("h", "high", 0), limits=full) == [True]
    sight = await store.line.look("m", 9)
    assert [standing.ticket.request for standing in sight.standings] == ["h", "n", "b1", "f"]
    assert sight.shed == {"b2"}
    assert sight.waiting == {"high": 1, "normal": 1, "batch": 1, "free": 1}
    assert list(await store.line.renew([RequestId("b2")], 60)) == ["b2"]
    assert await join(store, ticket("h2", "high", 0), limits=LineLimits(None, 4, ("spare",))) == [False]


async def hears(store: InstanceStore, act: Callable[[], Awaitable[object]]) -> bool:
    """Whether the act rings the bell."""
    async with store.line.listen() as bell:
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):  # what came before
                await bell.wait()
        await act()
        try:
            async with asyncio.timeout(QUIET_S):
                await bell.wait()
        except TimeoutError:
            return False
        return True


async def test_what_may_free_memory_is_heard_while_somebody_waits(store: InstanceStore) -> None:
    await store.publish(a_report("i1"), 60)
    await store.claim(claim("x"), [Candidate(I1, 0)], 60)
    await store.claim(claim("y"), [Candidate(I1, 1)], 60, Passage("m", 1, ahead=True))
    assert not await hears(store, lambda: store.publish(a_report("i1", sequence=2), 60, urgent=True))
    await join(store, ticket("a"), ticket("b"))
    assert await hears(store, lambda: store.publish(a_report("i1", sequence=3), 60, urgent=True))
    assert not await hears(store, lambda: store.publish(a_report("i1", sequence=4), 60))
    assert await hears(store, lambda: store.publish(a_report("i2"), 60))
    assert await hears(store, lambda: store.release(RequestId("x")))
    assert not await hears(store, lambda: store.release(RequestId("x")))
    assert await hears(store, lambda: store.line.started(RequestId("y")))
    assert await hears(store, lambda: store.line.leave(RequestId("a")))


async def test_a_dead_gateways_places_are_heard_to_go(store: InstanceStore) -> None:
    await join(store, ticket("mine"))
    await join(store, ticket("theirs", gateway="g2"), ttl_s=QUIET_S / 2)

    async def later() -> None:
        await asyncio.sleep(QUIET_S / 2)
        assert await names(store) == ["mine"]

    assert await hears(store, later)


async def test_a_bell_stays_whole_for_longer_than_a_heartbeat(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.registry.redis_link.HEARTBEAT_S", 0.05)
    await join(redis_store, ticket("a"), ticket("b"))
    async with redis_store.line.listen() as bell, asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(bell.wait())
        await asyncio.sleep(0.3)  # several heartbeats
        assert not waiting.done()
        await redis_store.line.leave(RequestId("a"))


async def test_a_bell_that_is_cut_off_rings_again_or_says_so(redis_store: RedisStore, redis_url: str) -> None:
    await join(redis_store, ticket("a"))
    async with redis_store.line.listen() as bell, asyncio.timeout(10):
        with Redis.from_url(redis_url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(bell))
            while not waiting.done():
                await join(redis_store, ticket("b"))
                await redis_store.line.leave(RequestId("b"))
                await asyncio.sleep(0.01)


async def _outcome(bell: Bell) -> None:
    with suppress(StoreError):
        await bell.wait()


async def test_without_redis_there_is_no_bell() -> None:
    store = RedisStore("redis://127.0.0.1:1", timeout_s=0.2)
    with pytest.raises(StoreError):
        async with store.line.listen():
            pass
    await store.close()


@pytest.mark.parametrize("name", ["a b", 'quo"te', "ü/☃", "", ":x"])
async def test_names_come_back_as_they_went_in(store: InstanceStore, name: str) -> None:
    odd = Ticket(RequestId(name or "r"), name, name, name or "t", 0, 1, ())
    assert await store.line.join(odd, FREE, 60)
    assert [standing.ticket for standing in (await store.line.look(name, 9)).standings] == [odd]
    assert (await store.line.look(name, 9)).waiting == {odd.tier: 1}
    held = replace(claim("c"), request=odd.request)
    assert await store.claim(held, [Candidate(I1, 0)], 60, Passage(name, 0)) == I1
    assert await store.line.look(name, 9) == LineSight([], {}, 0, 1, frozenset())
