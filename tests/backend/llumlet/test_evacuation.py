"""A backend that drains moves its requests away, with the session itself scripted; and its routes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from backend.llumlet import migrations
from backend.llumlet.wire import moved_event
from backend.registry.instance import InstanceState
from migration.departure import Announcement, Departure, Moved
from migration.plan import MigrationOutcome, MigrationResult
from tests.backend.llumlet.live import Backend, running_backend, wait_until
from tests.backend.llumlet.scripted_engine import event
from tests.backend.llumlet.test_drain import wait_state
from tests.backend.registry.reports import a_report

MOVED = MigrationOutcome(MigrationResult.MOVED, "", 1)
REFUSED = MigrationOutcome(MigrationResult.REFUSED, "no_memory", 0)
FAST = {"drain_retry_s": 0.01}


class Session:
    """Stands in for migration.session.run_migration: each call takes the next outcome, the last one for ever."""

    def __init__(self, *outcomes: MigrationOutcome) -> None:
        self.outcomes = list(outcomes)
        self.orders: list[tuple[str, str]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, departure: Departure, *, announce: Callable[[Announcement], Awaitable[None]], **_: object) -> MigrationOutcome:
        self.orders.append((departure.leg.request, departure.plan.destination.instance))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.go.wait()
        self.at_once -= 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome.result is MigrationResult.MOVED:
            await announce(Moved(1))
        return outcome


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session(MOVED)
    monkeypatch.setattr(migrations, "run_migration", session)
    return session


async def publish(backend: Backend, *instances: str, **fields: Any) -> None:
    for instance in instances:
        await backend.store.publish(a_report(instance, url=f"http://{instance}", models=("scripted",), **fields), 1000)


async def drain(backend: Backend, order: str = "drain") -> dict[str, Any]:
    response = await backend.client.post(f"{backend.url}/midstream/{order}")
    assert response.status_code == 200
    return dict(response.json())


async def status(backend: Backend) -> dict[str, Any]:
    return dict((await backend.client.get(f"{backend.url}/midstream/drain")).json())


async def wait_status(backend: Backend, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while not reached(seen := await status(backend)):
            await asyncio.sleep(0.005)
    return seen


async def test_the_requests_of_a_draining_instance_move_away_and_it_stays(session: Session) -> None:
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await publish(backend, "i2")
        await running.until(event(""))
        assert await status(backend) == {"state": "ready", "elapsed_s": 0.0, "remaining": 1, "requests": []}
        assert (await drain(backend))["state"] == "draining"
        assert (await running.rest()).endswith(moved_event(1))
        seen = await wait_status(backend, lambda seen: seen["remaining"] == 0)
        assert seen["requests"] == [{"request": "R", "destination": "i2", "result": "moved", "reason": "", "attempts": 1}]
        await wait_state(backend, InstanceState.DRAINING)
        assert not backend.stopped.is_set()
        async with backend.chat(request="S") as refused:
            assert refused.status == 503


async def test_one_that_is_told_to_leave_moves_them_too_and_then_stops(session: Session) -> None:
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await publish(backend, "i2")
        await running.until(event(""))
        backend.app.drain.leave()
        assert (await running.rest()).endswith(moved_event(1))
        async with asyncio.timeout(20):
            await backend.stopped.wait()


async def test_what_could_not_go_is_tried_again_elsewhere(session: Session) -> None:
    session.outcomes = [REFUSED, REFUSED, MOVED]
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await publish(backend, "i2", free_tokens=900)
        await publish(backend, "i3", free_tokens=800)
        await running.until(event(""))
        await drain(backend)
        await running.rest()
        assert session.orders == [("R", "i2"), ("R", "i3"), ("R", "i2")]
        (row,) = (await wait_status(backend, lambda seen: seen["remaining"] == 0))["requests"]
        assert (row["result"], row["attempts"]) == ("moved", 3)


async def test_only_so_many_move_at_a_time_and_all_do(session: Session) -> None:
    session.go.clear()
    async with running_backend(max_migrations_out=3, max_migrations_in=2, **FAST) as backend, asyncio.TaskGroup() as readers:

        async def read(request: str) -> None:
            async with backend.chat(request=request) as reader:
                assert (await reader.rest()).endswith(moved_event(1))

        await publish(backend, "i2", "i3")
        for number in range(7):
            readers.create_task(read(f"R{number}"))
        await wait_until(lambda: len(backend.app.flights) == 7)
        await drain(backend)
        await wait_until(lambda: session.at_once == 3)
        session.go.set()
        await wait_status(backend, lambda seen: seen["remaining"] == 0)
        assert session.most_at_once == 3
        assert len(session.orders) == len({request for request, _ in session.orders}) == 7


async def test_nobody_has_room_until_somebody_comes(session: Session) -> None:
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await running.until(event(""))
        await drain(backend)
        await publish(backend, "i2", state=InstanceState.DRAINING)
        await publish(backend, "i3")
        await running.rest()
        assert session.orders == [("R", "i3")]


async def test_a_drain_can_be_taken_back_but_not_once_it_leaves(session: Session) -> None:
    session.outcomes = [REFUSED]
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await running.until(event(""))
        await drain(backend)
        await wait_state(backend, InstanceState.DRAINING)
        assert (await drain(backend, "undrain"))["state"] == "ready"
        await wait_state(backend, InstanceState.READY)
        async with backend.chat(request="S") as accepted:
            assert accepted.status == 200
            backend.app.drain.leave()
            response = await backend.client.post(f"{backend.url}/midstream/undrain")
            assert (response.status_code, response.json()["error"]["code"]) == (409, "instance_leaving")
            backend.engine.feed(None, None)
            await accepted.rest()
        await running.rest()


async def test_what_cannot_move_stays_to_its_end(session: Session) -> None:
    async with running_backend(**FAST) as backend, backend.chat() as running:
        await publish(backend, "i2")
        await running.until(event(""))
        backend.exchange("R").flight.unmovable = "n"
        backend.app.drain.leave()
        await wait_state(backend, InstanceState.DRAINING)
        backend.engine.feed(None)
        assert (await running.rest()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(20):
            await backend.stopped.wait()
        assert not session.orders
