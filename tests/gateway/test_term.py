"""Who may act, and for how long: on the real Redis, and with a clock that a test stops."""

import time

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from gateway.term import Office
from tests.backend.registry.conftest import redis_store, redis_url  # noqa: F401  # fixtures
from tests.gateway.conftest import until


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_holder_that_stalls_acts_no_more_and_another_one_does(redis_store: RedisStore) -> None:  # noqa: F811
    clock = Clock()
    stalls = Office("job", "g", redis_store.leases, ttl_s=0.2, timeout_s=1, clock=clock)
    other = Office("job", "g", redis_store.leases, ttl_s=0.2, timeout_s=1, clock=time.monotonic)
    await stalls.hold()
    old = stalls.term
    assert old is not None
    await other.hold()
    assert other.term is None

    async def takes_over() -> bool:
        await other.hold()
        return other.term is not None

    await until(takes_over, within_s=2)
    new = other.term
    assert new is not None
    assert new.token > old.token
    clock.now_s += 0.2  # it wakes up
    assert not stalls.may_act(old)
    assert stalls.term is None
    await stalls.hold()
    assert stalls.term is None
    assert other.may_act(new)


async def test_renewed_it_is_the_same_term_and_given_back_it_is_free_at_once() -> None:
    clock = Clock()
    leases = MemoryStore(clock).leases
    first, second = (Office("job", "g", leases, ttl_s=1.5, timeout_s=1, clock=clock) for _ in range(2))
    await first.hold()
    term = first.term
    assert term is not None
    term.fenced.add("i1")  # type: ignore[arg-type]
    clock.now_s += 1.0
    await first.hold()
    assert first.term is term
    clock.now_s += 1.4
    assert first.may_act(term)
    await first.leave()
    assert not first.may_act(term)
    await second.hold()
    assert second.term is not None
    assert second.term.token > term.token
    assert not second.term.fenced
