"""Requests that come from other instances: the original HTTP request is handled here again, replaying the tokens it already has, and
its stream is kept for the gateway that attaches to it.

    admit (shell, replay begins) -> extend, finish (owner: the engine goes on) -> ended -> read to its end, or given up
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from backend.engine.base import Engine
from backend.engine.flight import Flight, Replay
from backend.llumlet.buffer import StreamBuffer
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import DuplicateLeg, Flights
from backend.llumlet.incoming import asks_for_stream, rank_of, scope_of
from backend.llumlet.settings import LlumletSettings
from migration.errors import Refused
from migration.leg import Leg
from migration.messages import Prepare, TokenStep

log = logging.getLogger(__name__)


class Arrival:
    """One arrived leg: its exchange, its buffer, and the task that serves it."""

    def __init__(self, flight: Flight, replay: Replay, settings: LlumletSettings) -> None:
        self.flight = flight
        self.replay = replay
        self.buffer = StreamBuffer(settings.stream_buffer_bytes)
        streams = asks_for_stream(flight.http.body)
        self.exchange = Exchange(flight, self.buffer, streams=streams, unwind_timeout_s=settings.unwind_timeout_s)
        self.owner = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Arrivals:
    """All of them; an async context manager, entered before the first. Implements migration.reception.Arrivals."""

    def __init__(
        self, engine: Engine, flights: Flights, settings: LlumletSettings, *, draining: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._flights = flights
        self._settings = settings
        self._draining = draining
        self._clock = clock
        self._arrivals: dict[Leg, Arrival] = {}
        self._tasks = asyncio.TaskGroup()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._tasks)
        self._stack.callback(self._cancel_all)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _cancel_all(self) -> None:
        for arrival in self._arrivals.values():
            if arrival.task is not None:
                arrival.task.cancel()

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def legs(self) -> frozenset[Leg]:
        """What is here, as long as its stream is."""
        return frozenset(self._arrivals)

    async def wait_empty(self) -> None:
        """Return when no leg is here any more, their streams read to the end or given up."""
        while self._arrivals:
            await asyncio.wait([arrival.task for arrival in self._arrivals.values() if arrival.task is not None])

    async def admit(self, prepare: Prepare) -> None:
        """Start handling the request; return when the engine holds it as a shell. Raises Refused."""
        leg = prepare.leg
        if self._draining():
            raise Refused(f"{self._settings.instance_id} is draining", reason="draining")
        if leg in self._arrivals:
            raise Refused(f"{leg} is here already", reason="duplicate")
        await self._wait_released(leg)
        replay = Replay()
        replay.extend(prepare.steps)
        flight = Flight(leg, prepare.http, tier=prepare.tier, rank=rank_of(prepare.http), replay=replay, created=prepare.created)
        flight.prefill = prepare.prefill
        arrival = self._arrivals[leg] = Arrival(flight, replay, self._settings)
        arrival.task = self._tasks.create_task(self._serve(arrival))
        await self._wait_shell(flight)

    async def _wait_released(self, leg: Leg) -> None:
        """A request that comes back: what is left of its earlier stay goes first, an engine may not know it twice."""
        try:
            async with asyncio.timeout(self._settings.admit_timeout_s):
                await self._flights.wait_released(leg.request)
        except TimeoutError:
            raise Refused(f"{leg.request} is still being served here", reason="still_here") from None

    async def _wait_shell(self, flight: Flight) -> None:
        async with asyncio.TaskGroup() as waiting:
            shell = waiting.create_task(flight.shell.wait())
            ended = waiting.create_task(flight.ended.wait())
            done, _ = await asyncio.wait([shell, ended], timeout=self._settings.admit_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            shell.cancel()
            ended.cancel()
        if not done:
            raise Refused(f"the engine did not take {flight.leg} in time", reason="admit_timeout")
        if shell not in done or flight.ended.is_set():
            raise Refused(f"the server did not admit {flight.leg}", reason="not_admitted")

    def extend(self, leg: Leg, steps: Sequence[TokenStep]) -> None:
        """More tokens to replay. Nothing happens if the leg is gone."""
        if (arrival := self._arrivals.get(leg)) is not None:
            arrival.replay.extend(tuple(steps))

    def finish(self, leg: Leg) -> None:
        """From here on the request runs here. Nothing happens if the leg is gone."""
        if (arrival := self._arrivals.get(leg)) is not None:
            arrival.replay.finish()
            arrival.flight.owned_since_s = self._clock()
            arrival.owner.set()

    async def drop(self, leg: Leg) -> None:
        """Stop handling it. On return the engine runs nothing of it any more."""
        arrival = self._arrivals.get(leg)
        if arrival is not None and arrival.task is not None:
            arrival.task.cancel()
            await asyncio.wait([arrival.task])
            self._arrivals.pop(leg, None)  # its task may not have begun
            arrival.flight.end()

    async def drop_older(self, leg: Leg) -> None:
        """Stop handling all earlier legs of that request."""
        for older in [known for known in self._arrivals if known.request == leg.request and known.epoch < leg.epoch]:
            await self.drop(older)

    async def wait_ended(self, leg: Leg) -> None:
        """Return when its handling here is over; at once for an unknown leg."""
        if (arrival := self._arrivals.get(leg)) is not None:
            await arrival.flight.ended.wait()

    def stream(self, leg: Leg) -> StreamBuffer | None:
        """The stream of a leg that arrived here and is not yet read to its end."""
        arrival = self._arrivals.get(leg)
        return arrival.buffer if arrival is not None else None

    async def _serve(self, arrival: Arrival) -> None:
        try:
            with self._flights.serving(arrival.exchange):
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(self._watch_attachment(arrival))
                    await arrival.exchange.serve(self._engine, scope_of(arrival.flight.http))
                    watch.cancel()
            await arrival.exchange.finish()
            arrival.buffer.close()
            await self._wait_read(arrival)
        except DuplicateLeg:
            log.warning("%s arrives where it is being served", arrival.flight.leg)
        except Exception:
            log.exception("serving %s failed", arrival.flight.leg)
        finally:
            arrival.flight.end()
            arrival.buffer.close()
            self._arrivals.pop(arrival.flight.leg, None)

    async def _watch_attachment(self, arrival: Arrival) -> None:
        """A request that runs here without anyone to read it is aborted."""
        await arrival.owner.wait()
        try:
            async with asyncio.timeout(self._settings.attach_timeout_s):
                await arrival.buffer.wait_attached()
        except TimeoutError:
            log.warning("nobody attached to %s within %.1f s; aborting it", arrival.flight.leg, self._settings.attach_timeout_s)
            arrival.buffer.abandon()

    async def _wait_read(self, arrival: Arrival) -> None:
        """Keep the stream of a request that is over until it was read: briefly for a reader to come, then as long as one reads."""
        if not arrival.owner.is_set():
            return
        try:
            async with asyncio.timeout(self._settings.attach_timeout_s):
                await arrival.buffer.wait_attached()
        except TimeoutError:
            return
        await arrival.buffer.wait_read()
