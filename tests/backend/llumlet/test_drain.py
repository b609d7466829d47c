"""Draining a served backend, and its life as an app."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backend.llumlet.app import build
from backend.llumlet.settings import LlumletSettings
from backend.llumlet.wire import moved_event, released_event
from backend.registry.instance import InstanceState
from backend.registry.memory import MemoryStore
from migration.errors import Refused
from tests.backend.llumlet.live import Backend, running_backend, wait_until
from tests.backend.llumlet.scripted_engine import ScriptedEngine, event
from tests.backend.llumlet.test_arrival import prepare


async def state(backend: Backend) -> InstanceState | None:
    return next((sighting.report.state for sighting in await backend.store.sightings()), None)


async def wait_state(backend: Backend, wanted: InstanceState) -> None:
    async with asyncio.timeout(5):
        while await state(backend) != wanted:
            await asyncio.sleep(0.002)


async def test_an_idle_backend_is_drained_at_once() -> None:
    async with running_backend() as backend:
        await wait_state(backend, InstanceState.READY)
        backend.app.drain.leave()
        async with asyncio.timeout(5):
            await backend.stopped.wait()
    assert await backend.store.sightings() == []
    assert not backend.app.failed


async def test_new_requests_are_refused_and_running_ones_end_in_peace() -> None:
    async with running_backend(report_heartbeat_s=1000.0, drain_retry_after_s=3) as backend, backend.chat() as running:
        await running.until(event(""))
        backend.app.drain.leave()
        await wait_state(backend, InstanceState.DRAINING)
        async with backend.chat(request="S") as refused:
            answer = await refused.rest()
        assert (refused.status, refused.headers["retry-after"]) == (503, "3")
        assert b'"code":"instance_draining"' in answer
        with pytest.raises(Refused) as no:
            await backend.arrivals.admit(prepare(1))
        assert no.value.reason == "draining"
        assert (await backend.client.get(f"{backend.url}/midstream/load")).json()["state"] == "draining"
        assert not backend.stopped.is_set()
        backend.engine.feed(7, None)
        assert (await running.rest()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(5):
            await backend.stopped.wait()


async def test_a_request_that_moves_away_lets_the_drain_end() -> None:
    async with running_backend() as backend, backend.chat() as running:
        await running.until(event(""))
        backend.app.drain.leave()
        backend.exchange("R").hand_over(moved_event(1))
        assert (await running.rest()).endswith(moved_event(1))
        async with asyncio.timeout(5):
            await backend.stopped.wait()


async def test_an_arrived_stream_must_be_read_before_the_drain_ends() -> None:
    async with running_backend() as backend:
        await backend.arrivals.admit(prepare(1))
        backend.arrivals.finish(prepare().leg)
        backend.app.drain.leave()
        backend.engine.feed(None)
        await wait_until(lambda: backend.engine.closed)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not backend.stopped.is_set()
        async with backend.attach("R", 1) as reader:
            await reader.rest()
        async with asyncio.timeout(5):
            await backend.stopped.wait()


async def test_the_deadline_gives_up_what_still_runs_and_says_so() -> None:
    async with running_backend(drain_deadline_s=0.05) as backend, backend.chat() as running:
        await running.until(event(""))
        backend.app.drain.leave()
        assert (await running.rest()).endswith(released_event("drained"))
        async with asyncio.timeout(5):
            await backend.stopped.wait()
        assert backend.engine.flights == {}


async def test_a_background_task_that_dies_stops_the_backend() -> None:
    async with running_backend(report_heartbeat_s=0.02, report_interval_s=0.01) as backend:
        await wait_state(backend, InstanceState.READY)
        del backend.engine.flights  # now load() fails
        async with asyncio.timeout(5):
            await backend.stopped.wait()
        backend.engine.flights = {}
    assert backend.app.failed


async def test_an_engine_that_does_not_start_fails_the_start_up() -> None:
    class Broken(ScriptedEngine):
        @asynccontextmanager
        async def running(self) -> AsyncIterator[None]:
            if not self.flights:
                raise RuntimeError("no memory")
            yield

    stopped: list[bool] = []
    settings = LlumletSettings(advertised_url="http://i1")
    app = build(Broken(), settings, MemoryStore(asyncio.get_running_loop().time), stop=lambda: stopped.append(True))
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    said: list[str] = []

    async def send(message: dict[str, str]) -> None:
        said.append(message["type"])

    inbox.put_nowait({"type": "lifespan.startup"})
    await app({"type": "lifespan"}, inbox.get, send)  # type: ignore[arg-type]
    assert (said, stopped, app.failed) == (["lifespan.startup.failed"], [True], True)


async def test_an_instance_nobody_could_reach_is_not_built() -> None:
    with pytest.raises(ValueError, match="advertised_url"):
        build(ScriptedEngine(), LlumletSettings(), MemoryStore(asyncio.get_running_loop().time))
