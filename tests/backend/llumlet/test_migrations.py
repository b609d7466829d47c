"""Orders to move a request away, over a real server, with the session itself scripted."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from backend.llumlet import migrations
from backend.llumlet.wire import kept_event, lost_event, moved_event, moving_event
from migration.departure import Announcement, Departure, Kept, Lost, Moved, Moving
from migration.leg import InstanceId
from migration.plan import MigrationMode, MigrationOutcome, MigrationResult
from tests.backend.llumlet.live import Backend, running_backend, wait_until
from tests.backend.llumlet.scripted_engine import event
from tests.backend.llumlet.test_arrival import prepare

Announce = Callable[[Announcement], Awaitable[None]]
I2 = InstanceId("i2")


class Session:
    """Stands in for migration.session.run_migration."""

    def __init__(self) -> None:
        self.departures: list[Departure] = []
        self.pairs: list[object] = []
        self.news: list[Announcement] = []
        self.go = asyncio.Event()
        self.go.set()
        self.outcome = MigrationOutcome(MigrationResult.MOVED, "", 1, stages=2, bytes=123, frozen_ms=9.5, total_ms=240.0)
        self.error: Exception | None = None

    async def __call__(self, departure: Departure, *, announce: Announce, pair: object, **_: object) -> MigrationOutcome:
        self.departures.append(departure)
        self.pairs.append(pair)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        for one in self.news:
            await announce(one)
        return self.outcome


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()
    monkeypatch.setattr(migrations, "run_migration", session)
    return session


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with running_backend() as backend:
        yield backend


async def order(backend: Backend, request: str = "R", instance: str = "i2", **fields: object) -> tuple[int, dict[str, object]]:
    plan = {"request": request, "destination": {"instance": instance, "url": "http://i2/"}, **fields}
    answer = await backend.client.post(f"{backend.url}/midstream/migrations", json=plan)
    return answer.status_code, answer.json()


async def test_a_move_is_carried_out_announced_and_answered(backend: Backend, session: Session) -> None:
    session.news = [Moving(1, I2, "http://i2"), Moved(1)]
    async with backend.chat() as reader:
        before = await reader.until(event(""))
        status, outcome = await order(backend, mode="stop_copy")
        assert await reader.rest() == before + moving_event(1, "i2", "http://i2") + moved_event(1)
    assert (status, outcome) == (
        200,
        {"result": "moved", "reason": "", "epoch": 1, "stages": 2, "bytes": 123, "frozen_ms": 9.5, "total_ms": 240.0},
    )
    (departure,) = session.departures
    assert (departure.source, departure.tier, departure.created()) == ("i1", "high", 100)
    assert (departure.plan.mode, departure.plan.destination.url) == (MigrationMode.STOP_COPY, "http://i2")
    assert [departure.new_leg().epoch, departure.new_leg().epoch] == [1, 2]
    await wait_until(lambda: backend.engine.closed)
    metrics = (await backend.client.get(f"{backend.url}/midstream/metrics")).text
    assert 'midstream_migrations_total{reason="",result="moved"} 1.0' in metrics
    assert "midstream_migration_bytes_total 123.0" in metrics
    assert "midstream_migrations_out 0.0" in metrics


async def test_a_request_that_is_kept_goes_on(backend: Backend, session: Session) -> None:
    session.news = [Moving(1, I2, "u"), Kept(1)]
    session.outcome = MigrationOutcome(MigrationResult.REFUSED, "no_memory", 1)
    async with backend.chat() as reader:
        before = await reader.until(event(""))
        status, outcome = await order(backend)
        assert (status, outcome["result"], outcome["reason"]) == (200, "refused", "no_memory")
        backend.engine.feed(7, None)
        text = await reader.rest()
    after = b"id: 1.0;7\n" + event("<7>") + b"id: 1.1;\ndata: [DONE]\n\n"
    assert text == before + moving_event(1, "i2", "u") + kept_event(1) + after


async def test_a_lost_request_says_so_and_ends(backend: Backend, session: Session) -> None:
    session.news = [Lost(1, "link")]
    async with backend.chat() as reader:
        before = await reader.until(event(""))
        await order(backend)
        assert await reader.rest() == before + lost_event("link")


async def test_one_move_of_a_request_at_a_time(backend: Backend, session: Session) -> None:
    session.go.clear()
    async with backend.chat() as reader:
        await reader.until(event(""))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(order(backend))
            await wait_until(lambda: session.departures)
            assert (await backend.requests())[0]["state"] == "moving"
            assert (await order(backend))[1]["reason"] == "already_moving"
            assert (await backend.client.get(f"{backend.url}/midstream/load")).json()["migrations_out"] == 1
            session.go.set()
            assert (await first)[1]["result"] == "moved"
        assert (await order(backend))[1]["result"] == "moved"  # and another one after it


async def test_moves_at_the_same_time_are_bounded(session: Session) -> None:
    session.go.clear()
    async with running_backend(max_migrations_out=1) as backend, backend.chat() as first, backend.chat(request="S") as second:
        await first.until(event(""))
        await second.until(event(""))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(order(backend))
            await wait_until(lambda: session.departures)
            assert (await order(backend, "S"))[1]["reason"] == "source_busy"
            session.go.set()


async def test_moves_to_one_peer_share_their_pair(backend: Backend, session: Session) -> None:
    async with backend.chat() as reader:
        await reader.until(event(""))
        for instance in ("i2", "i3", "i2"):
            await order(backend, instance=instance)
    first, second, third = session.pairs
    assert first is third
    assert first is not second


async def test_orders_that_make_no_sense(backend: Backend, session: Session) -> None:
    assert (await order(backend))[0] == 404
    async with backend.chat() as reader:
        await reader.until(event(""))
        assert (await order(backend, instance="i1"))[1]["reason"] == "same_instance"
        assert (await order(backend, mode="teleport"))[0] == 400
        for body in (b"{", b"[]", b'{"request":1,"destination":{"instance":"a","url":"b"}}', b'{"request":"R"}'):
            answer = await backend.client.post(f"{backend.url}/midstream/migrations", content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert session.departures == []


async def test_a_request_that_is_still_arriving_stays(backend: Backend, session: Session) -> None:
    await backend.arrivals.admit(prepare(1))
    assert (await order(backend))[1] | {"total_ms": 0} == {
        "result": "unmovable",
        "reason": "arriving",
        "epoch": 1,
        "stages": 0,
        "bytes": 0,
        "frozen_ms": 0.0,
        "total_ms": 0,
    }
    backend.arrivals.finish(prepare().leg)
    assert (await order(backend))[1]["result"] == "moved"


async def test_a_session_that_breaks_is_a_failed_move_and_nothing_worse(backend: Backend, session: Session) -> None:
    session.error = RuntimeError("a bug")
    async with backend.chat() as reader:
        await reader.until(event(""))
        assert (await order(backend))[1]["reason"] == "internal"
        backend.engine.feed(None)
        assert (await reader.rest()).endswith(b"data: [DONE]\n\n")


async def test_a_move_goes_on_without_whoever_ordered_it(backend: Backend, session: Session) -> None:
    session.go.clear()
    session.news = [Moved(1)]
    async with backend.chat() as reader:
        await reader.until(event(""))
        ordering = asyncio.get_running_loop().create_task(order(backend))
        await wait_until(lambda: session.departures)
        ordering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ordering
        session.go.set()
        assert (await reader.rest()).endswith(moved_event(1))


async def test_created_is_fixed_when_a_move_begins_before_the_first_event(backend: Backend, session: Session) -> None:
    exchange = None

    async def chat() -> bytes:
        async with backend.chat(b'{"stream":false}') as reader:
            return await reader.rest()

    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(chat())
        await backend.engine.started.wait()
        await order(backend)
        exchange = backend.exchange("R")
        shown = session.departures[0].created()
        assert shown is not None
        assert shown == session.departures[0].created() == exchange.flight.created
        backend.engine.feed(7, None)
    fields = json.loads((await answer).partition(b"data: ")[2])
    assert b'"created":%d' % shown in base64.b64decode(fields["body"])


async def test_messages_that_make_no_sense(backend: Backend) -> None:
    for body in (b"{", b"{}", b'{"kind":"prepare"}'):
        assert (await backend.client.post(f"{backend.url}/midstream/messages", content=body)).status_code == 400
    assert (await backend.client.get(f"{backend.url}/midstream/nothing")).status_code == 404


async def test_messages_reach_the_receptions(backend: Backend) -> None:
    body = {"kind": "query", "leg": {"request": "R", "epoch": 4}}
    answer = await backend.client.post(f"{backend.url}/midstream/messages", json=body)
    assert (answer.status_code, answer.json()["kind"], answer.json()["state"]) == (200, "state_is", "unknown")
