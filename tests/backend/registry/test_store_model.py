"""The same random operations on a store and on a plain dictionary (and on both stores) must give the same answers."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.registry.instance import LoadReport
from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import Candidate, Claim, InstanceStore
from migration.leg import InstanceId, Leg, RequestId
from tests.backend.registry.reports import a_report

T = TypeVar("T")

requests = st.sampled_from([RequestId(name) for name in "abcd"])
instances = st.sampled_from([InstanceId(name) for name in ("i1", "i2", "i3")])
ttls_s = st.sampled_from([1.0, 5.0, 20.0])


def run(answer: Coroutine[Any, Any, T]) -> T:
    """The memory store never waits."""
    try:
        answer.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the memory store waited")


class MemoryStoreMachine(RuleBasedStateMachine):
    """A model with explicit expiry times against the store."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.store = MemoryStore(lambda: self.now_s)
        self.reports: dict[InstanceId, tuple[LoadReport, float, float]] = {}
        self.held: dict[RequestId, tuple[Claim, float]] = {}
        self.switches: dict[Leg, tuple[float, float]] = {}

    @initialize()
    def start(self) -> None:
        assert not run(self.store.sightings())

    def live_reports(self) -> dict[InstanceId, tuple[LoadReport, float]]:
        return {name: (report, seen_s) for name, (report, seen_s, end_s) in self.reports.items() if end_s > self.now_s}

    def live(self) -> dict[RequestId, Claim]:
        return {request: held for request, (held, end_s) in self.held.items() if end_s > self.now_s}

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(instance=instances, incarnation=st.sampled_from("xy"), sequence=st.integers(0, 5), ttl_s=ttls_s)
    def publish(self, instance: InstanceId, incarnation: str, sequence: int, ttl_s: float) -> None:
        report = a_report(instance, incarnation=incarnation, sequence=sequence, free_tokens=sequence)
        run(self.store.publish(report, ttl_s))
        known = self.live_reports().get(instance)
        if not (known and known[0].incarnation == incarnation and known[0].sequence > sequence):
            self.reports[instance] = (report, self.now_s, self.now_s + ttl_s)

    @rule(instance=instances)
    def withdraw(self, instance: InstanceId) -> None:
        run(self.store.withdraw(instance))
        self.reports.pop(instance, None)

    @rule(request=requests, wanted=st.lists(st.tuples(instances, st.integers(0, 2)), max_size=3), tokens=st.integers(0, 99), ttl_s=ttls_s)
    def claim(self, request: RequestId, wanted: list[tuple[InstanceId, int]], tokens: int, ttl_s: float) -> None:
        claim = Claim(request, InstanceId("ignored"), "g", "normal", tokens)
        chosen = run(self.store.claim(claim, [Candidate(*pair) for pair in wanted], ttl_s))
        live = self.live()
        if request in live:
            assert chosen == live[request].instance
            return
        counts = [(name, seen, sum(held.instance == name for held in live.values())) for name, seen in wanted]
        expected = next((name for name, seen, count in counts if count <= seen), None)
        assert chosen == expected
        if expected is not None:
            self.held[request] = (replace(claim, instance=expected), self.now_s + ttl_s)

    @rule(request=requests, to=instances)
    def move(self, request: RequestId, to: InstanceId) -> None:
        live = self.live()
        assert run(self.store.move_claim(request, to)) == (request in live)
        if request in live:
            self.held[request] = (replace(live[request], instance=to), self.held[request][1])

    @rule(wanted=st.lists(requests, max_size=3), ttl_s=ttls_s)
    def renew(self, wanted: list[RequestId], ttl_s: float) -> None:
        live = self.live()
        assert list(run(self.store.renew(wanted, ttl_s))) == [request for request in wanted if request not in live]
        for request in live.keys() & set(wanted):
            self.held[request] = (live[request], self.now_s + ttl_s)

    @rule(request=requests)
    def release(self, request: RequestId) -> None:
        assert run(self.store.release(request)) == (request in self.live())
        self.held.pop(request, None)

    @rule(request=requests, epoch=st.integers(0, 2), gap_ms=st.floats(0, 100), ttl_s=ttls_s)
    def switch(self, request: RequestId, epoch: int, gap_ms: float, ttl_s: float) -> None:
        run(self.store.record_switch(Leg(request, epoch), gap_ms, ttl_s))
        self.switches[Leg(request, epoch)] = (gap_ms, self.now_s + ttl_s)

    @invariant()
    def same_view(self) -> None:
        live = self.live()
        assert list(run(self.store.claims())) == [live[request] for request in sorted(live)]
        expected = []
        for name, (report, seen_s) in sorted(self.live_reports().items()):
            here = [held.tokens for held in live.values() if held.instance == name]
            expected.append((report, self.now_s - seen_s, len(here), sum(here)))
        assert [(s.report, s.age_s, s.claims, s.claimed_tokens) for s in run(self.store.sightings())] == expected
        for leg, (gap_ms, end_s) in self.switches.items():
            assert run(self.store.switch_gap_ms(leg)) == (gap_ms if end_s > self.now_s else None)


TestMemoryStore = MemoryStoreMachine.TestCase
TestMemoryStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Operation:
    name: str
    request: RequestId
    instance: InstanceId
    seen: int

    async def on(self, store: InstanceStore) -> object:
        match self.name:
            case "publish":
                await store.publish(a_report(self.instance, incarnation="x", sequence=self.seen, free_tokens=self.seen), 1000)
            case "withdraw":
                await store.withdraw(self.instance)
            case "claim":
                claim = Claim(self.request, self.instance, "g", "t", self.seen)
                candidates = [Candidate(self.instance, self.seen), Candidate(InstanceId("i9"), 0)]
                return await store.claim(claim, candidates, 1000)
            case "move":
                return await store.move_claim(self.request, self.instance)
            case "renew":
                return list(await store.renew([self.request], 1000))
            case "release":
                return await store.release(self.request)
        seen = [(s.report, s.claims, s.claimed_tokens) for s in await store.sightings()]
        return seen, list(await store.claims())


NAMES = ["publish", "withdraw", "claim", "claim", "move", "renew", "release", "look"]
operations = st.lists(st.builds(Operation, st.sampled_from(NAMES), requests, instances, st.integers(0, 3)), max_size=25)


@pytest.mark.timeout(120)
def test_both_stores_answer_alike(redis_url: str) -> None:
    loop = asyncio.new_event_loop()
    redis_store = RedisStore(redis_url)

    async def compare(script: list[Operation]) -> None:
        memory_store = MemoryStore(loop.time)
        await redis_store._link._redis.flushall()
        for operation in [*script, Operation("look", RequestId(""), InstanceId(""), 0)]:
            assert await operation.on(redis_store) == await operation.on(memory_store), operation

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(operations)
    def scripts(script: list[Operation]) -> None:
        loop.run_until_complete(compare(script))

    try:
        scripts()
    finally:
        loop.run_until_complete(redis_store.close())
        loop.close()
