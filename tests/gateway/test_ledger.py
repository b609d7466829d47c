"""The store fails, forgets, hangs and comes back: requests are served, and claims are right again in the end."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from backend.registry.memory import MemoryStore
from backend.registry.store import Candidate, Sighting, StoreError
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from migration.leg import InstanceId, RequestId
from tests.gateway.conftest import make_rig, report, until
from tests.gateway.scripted import Exchange, shown, told

A, B = InstanceId("a"), InstanceId("b")


class FlakyStore(MemoryStore):
    """Fails while `down`, hangs while `stuck`."""

    down = False
    stuck = False

    async def _ready(self) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        if self.down:
            raise StoreError("down")

    async def sightings(self) -> Sequence[Sighting]:
        await self._ready()
        return await super().sightings()

    async def claim(self, claim, candidates, ttl_s, passage=None):  # type: ignore[no-untyped-def]
        await self._ready()
        return await super().claim(claim, candidates, ttl_s, passage)

    async def move_claim(self, request: RequestId, to: InstanceId) -> bool:
        await self._ready()
        return await super().move_claim(request, to)

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        await self._ready()
        return await super().renew(requests, ttl_s)

    async def release(self, request: RequestId) -> bool:
        await self._ready()
        return await super().release(request)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ledger_of(store: MemoryStore, clock: Clock, **settings: float) -> Ledger:
    return Ledger(store, GatewaySettings(**{"_env_file": None, **settings}), clock, Metrics(CollectorRegistry()))  # type: ignore[arg-type]


async def claims(store: MemoryStore) -> dict[str, str]:
    return {claim.request: claim.instance for claim in await store.claims()}


class CountingStore(MemoryStore):
    """Counts looks; each waits until `let` is set."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.looks = 0
        self.failures: list[Exception] = []
        self.let = asyncio.Event()
        self.let.set()

    async def sightings(self) -> Sequence[Sighting]:
        self.looks += 1
        await self.let.wait()
        if self.failures:
            raise self.failures.pop()
        return await super().sightings()


async def test_a_view_that_gets_old_serves_while_the_next_is_made() -> None:
    clock = Clock()
    store = CountingStore(clock)
    ledger = ledger_of(store, clock)
    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(ledger.look_beside())
        await ledger.view(0.02)
        await store.publish(report("a", "http://a"), ttl_s=1000)
        clock.now_s += 0.03
        store.let.clear()
        assert (await ledger.view(0.02)).instances == ()  # at once
        await until(lambda: store.looks == 2)
        store.let.set()
        await until(lambda: [view.id for view in ledger.last_view().instances] == ["a"])
        assert (await ledger.view(0.02), store.looks) == (ledger.last_view(), 2)
        beside.cancel()


@pytest.mark.parametrize("failure", [StoreError("down"), RuntimeError("nonsense")])
async def test_a_look_that_fails_is_not_the_last(failure: Exception) -> None:
    clock = Clock()
    store = CountingStore(clock)
    ledger = ledger_of(store, clock, store_retry_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(ledger.look_beside())
        await ledger.view(0.02)
        store.failures.append(failure)
        clock.now_s += 0.03
        await ledger.view(0.02)
        await until(lambda: not store.failures)
        await store.publish(report("a", "http://a"), ttl_s=1000)
        clock.now_s += 0.03
        assert [view.id for view in (await ledger.view(0.02)).instances] == ["a"]  # by himself
        clock.now_s += 0.03
        looks = store.looks
        await ledger.view(0.02)
        await until(lambda: store.looks == looks + 1)
        beside.cancel()


async def test_a_view_twice_as_old_is_waited_for() -> None:
    clock = Clock()
    store = CountingStore(clock)
    ledger = ledger_of(store, clock)
    await ledger.view(0.02)
    await store.publish(report("a", "http://a"), ttl_s=1000)
    clock.now_s += 0.05
    assert [view.id for view in (await ledger.view(0.02)).instances] == ["a"]
    assert store.looks == 2


async def test_place_is_claimed_moved_and_given_back() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    ledger = ledger_of(store, clock)
    async with ledger.place(RequestId("r"), "high", 7) as place:
        assert await ledger.take(place, [Candidate(A, 0), Candidate(B, 0)])
        assert ledger.is_live(RequestId("r"))
        assert await claims(store) == {"r": "a"}
        await ledger.move(place, B)
        assert await claims(store) == {"r": "b"}
    assert await claims(store) == {}
    assert not ledger.is_live(RequestId("r"))


async def test_conflict_takes_nothing() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    ledger = ledger_of(store, clock)
    async with ledger.place(RequestId("r"), "high", 7) as place:
        assert not await ledger.take(place, [Candidate(A, -1)])
        assert place.instance is None


async def test_without_a_store_the_last_view_is_used_and_claims_are_made_up_for() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    await store.publish(report("a"), 1000)
    ledger = ledger_of(store, clock, store_retry_s=1.0)
    await ledger.view(0.0)
    store.down = True
    clock.now_s += 1
    async with ledger.place(RequestId("r"), "normal", 7) as place:
        view = await ledger.view(0.0)
        assert [one.claims for one in view.instances] == [0]
        assert await ledger.take(place, [Candidate(A, 0)])
        assert (place.instance, place.claimed) == (A, False)
        assert [one.claims for one in (await ledger.view(0.0)).instances] == [1]
        store.down = False
        clock.now_s += 2
        await ledger.renew()
        assert ledger.is_store_up
        assert place.claimed
        assert await claims(store) == {"r": "a"}
        assert [one.claims for one in (await ledger.view(0.0)).instances] == [1]
    assert await claims(store) == {}


async def test_claims_a_restarted_store_forgot_are_made_again() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    await store.publish(report("a"), 1000)
    ledger = ledger_of(store, clock)
    async with ledger.place(RequestId("r"), "normal", 7) as place, ledger.place(RequestId("s"), "normal", 7) as other:
        assert await ledger.take(place, [Candidate(A, 0)])
        assert await ledger.take(other, [Candidate(A, 1)])
        await store.release(RequestId("r"))
        await store.release(RequestId("s"))
        await ledger.renew()
        assert await claims(store) == {"r": "a", "s": "a"}
    assert await claims(store) == {}


async def test_renewal_keeps_claims_alive_and_ends_with_the_gateway() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    ledger = ledger_of(store, clock, claim_ttl_s=10.0)
    async with ledger.place(RequestId("r"), "normal", 7) as place:
        assert await ledger.take(place, [Candidate(A, 0)])
        for _ in range(5):
            clock.now_s += 9
            await ledger.renew()
        assert await claims(store) == {"r": "a"}
        clock.now_s += 11
        assert await claims(store) == {}


async def test_requests_are_served_while_the_store_fails_and_hangs() -> None:
    store = FlakyStore(asyncio.get_running_loop().time)

    async def tell(exchange: Exchange) -> None:
        await exchange.stream(*told())

    async with make_rig(store, store_timeout_s=0.1, store_retry_s=0.1) as rig:
        (await rig.add("a")).script = tell
        assert (await rig.ask()).content == shown(told())
        for fault in ("down", "stuck"):
            setattr(store, fault, True)
            assert (await rig.ask()).content == shown(told())
            assert (await rig.ask()).content == shown(told())
            assert (await rig.client.get("/health")).json() == {"status": "degraded", "instances": 1, "store": "down"}
            setattr(store, fault, False)
        await asyncio.sleep(0.1)
        assert (await rig.ask()).content == shown(told())
        assert (await rig.client.get("/health")).json() == {"status": "ok", "instances": 1, "store": "up"}
        await rig.quiet()


async def test_what_is_counted_between_two_looks_is_seen_at_once_and_as_if_all_were_put_together_anew() -> None:
    clock = Clock()
    store = FlakyStore(clock)
    for name in ("b", "a", "c"):
        await store.publish(report(name), 60)
    ledger = ledger_of(store, clock)
    before = await ledger.view(0.0)
    assert ledger.last_view() is before
    async with ledger.place(RequestId("r"), "high", 7) as place, ledger.place(RequestId("s"), "high", 5) as other:
        assert await ledger.take(place, [Candidate(B, 0)])
        assert await ledger.take(other, [Candidate(InstanceId("gone"), 0)])
        seen = ledger.last_view()
        assert [(view.id, view.claims, view.claimed_tokens) for view in seen.instances] == [("a", 0, 0), ("b", 1, 7), ("c", 0, 0)]
        await ledger.move(place, A)
        seen = ledger.last_view()
        clock.now_s += 1.0
        anew = ledger.last_view()
        assert [view.claims for view in seen.instances] == [view.claims for view in anew.instances] == [1, 0, 0]
        assert [view.age_s for view in anew.instances] == [1.0, 1.0, 1.0]
    assert [view.claims for view in ledger.last_view().instances] == [0, 0, 0]


class SlowStore(MemoryStore):
    """Answers when it is let, in order; what it is asked happens at once, as in a store at the end of a wire."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.answers: list[asyncio.Event] = []
        self.slow = False

    async def _answer(self) -> None:
        if self.slow:
            self.answers.append(asyncio.Event())
            await self.answers[-1].wait()

    async def sightings(self) -> Sequence[Sighting]:
        seen = await super().sightings()
        await self._answer()
        return seen

    async def claim(self, claim, candidates, ttl_s, passage=None):  # type: ignore[no-untyped-def]
        chosen = await super().claim(claim, candidates, ttl_s, passage)
        await self._answer()
        return chosen


def counts(ledger: Ledger) -> list[tuple[int, int]]:
    return [(view.claims, view.claimed_tokens) for view in ledger.last_view().instances]


async def slow_ledger() -> tuple[SlowStore, Ledger]:
    store = SlowStore(Clock())
    for name in ("a", "b"):
        await store.publish(report(name), 60)
    ledger = ledger_of(store, Clock())
    await ledger.view(0.0)
    store.slow = True
    return store, ledger


async def test_a_claim_counts_from_when_it_is_asked_for() -> None:
    store, ledger = await slow_ledger()
    async with ledger.place(RequestId("r"), "high", 7) as place, asyncio.TaskGroup() as group:
        taking = group.create_task(ledger.take(place, [Candidate(A, 0), Candidate(B, 0)]))
        await asyncio.sleep(0)
        assert counts(ledger) == [(1, 7), (0, 0)]
        store.answers[0].set()
        assert await taking
        assert counts(ledger) == [(1, 7), (0, 0)]
        store.slow = False
    assert counts(ledger) == [(0, 0), (0, 0)]


async def test_the_next_best_is_taken_and_counted_if_another_gateway_was_faster() -> None:
    store, ledger = await slow_ledger()
    store.slow = False
    async with ledger_of(store, Clock()).place(RequestId("s"), "high", 5) as theirs:
        assert await ledger_of(store, Clock()).take(theirs, [Candidate(A, 0)])
        async with ledger.place(RequestId("r"), "high", 7) as place:
            assert await ledger.take(place, [Candidate(A, 0), Candidate(B, 0)])
            assert place.instance == B
            assert counts(ledger) == [(0, 0), (1, 7)]  # of theirs it knows nothing yet
            await ledger.view(-1.0)
            assert counts(ledger) == [(1, 5), (1, 7)]
            async with ledger.place(RequestId("t"), "high", 3) as third:
                assert not await ledger.take(third, [Candidate(A, 0), Candidate(B, 0)])
                assert counts(ledger) == [(1, 5), (1, 7)]


async def test_a_client_that_leaves_while_its_claim_is_asked_for_leaves_no_count() -> None:
    store, ledger = await slow_ledger()
    async with ledger.place(RequestId("r"), "high", 7) as place:
        taking = asyncio.ensure_future(ledger.take(place, [Candidate(A, 0)]))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        assert counts(ledger) == [(0, 0), (0, 0)]
        store.slow = False
    assert await claims(store) == {}


async def test_a_look_forgets_nothing_that_was_asked_after_it_and_counts_nothing_twice_that_was_asked_before() -> None:
    store, ledger = await slow_ledger()
    names = ("before", "lost", "after")
    async with AsyncExitStack() as stack:
        before, lost, after = [await stack.enter_async_context(ledger.place(RequestId(name), "high", 7)) for name in names]
        async with asyncio.TaskGroup() as group:
            group.create_task(ledger.take(before, [Candidate(A, 0)]))
            group.create_task(ledger.take(lost, [Candidate(B, -1)]))  # refused
            looking = group.create_task(ledger.view(-1.0))
            await asyncio.sleep(0)
            group.create_task(ledger.take(after, [Candidate(B, 0)]))
            await asyncio.sleep(0)
            assert len(store.answers) == 4
            for answer in store.answers:
                answer.set()
            await looking
        assert counts(ledger) == [(1, 7), (1, 7)]
        store.slow = False
        await ledger.view(-1.0)
        assert counts(ledger) == [(1, 7), (1, 7)]


async def test_one_look_serves_all_that_asked_before_it_began() -> None:
    store, ledger = await slow_ledger()
    async with asyncio.TaskGroup() as group:
        views = [group.create_task(ledger.view(-1.0)) for _ in range(4)]
        await asyncio.sleep(0)
        assert len(store.answers) == 1
        store.answers[0].set()
        await views[0]
        await asyncio.sleep(0)
        assert len(store.answers) == 2
        assert not any(view.done() for view in views[1:])
        store.answers[1].set()
    assert len(store.answers) == 2
