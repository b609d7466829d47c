"""POST /midstream/resume: a request whose instance is gone goes on here, from the token ids that its gateway has relayed.

The original HTTP request is handled again, the known tokens are replayed up to the last one, and only then the engine goes on, with
their KV computed anew. The answer is the whole stream from its first event, and its gateway drops what the client has been shown.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

from backend.engine.base import Engine
from backend.engine.flight import Flight, Replay
from backend.llumlet.arrival import Arrivals
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import DuplicateLeg, Flights
from backend.llumlet.incoming import asks_for_stream, leg_of, scope_of
from backend.llumlet.outlet import ClientOutlet
from backend.llumlet.reply import Reply
from backend.llumlet.settings import LlumletSettings
from backend.llumlet.wire import lost_event
from migration.errors import MigrationError, Refused, RequestEnded
from migration.leg import Leg
from migration.messages import HttpRequest, TokenStep
from migration.reception import Receptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a gateway knows of a request that it wants to go on: `created` is the second the client was shown, if any."""

    leg: Leg
    tier: str
    created: int | None
    steps: tuple[TokenStep, ...]
    http: HttpRequest


def read_resumption(body: Any) -> Resumption:
    """The order in a JSON body. Raises a 400 Reply."""
    try:
        http = body["http"]
        headers = tuple((str(name).lower(), str(value)) for name, value in http["headers"])
        return Resumption(
            leg=leg_of(str(body["request"]), str(body["epoch"])),
            tier=str(body["tier"]),
            created=None if body["created"] is None else int(body["created"]),
            steps=tuple(TokenStep(int(token)) for token in body["tokens"]),
            http=HttpRequest(str(http["path"]), headers, base64.b64decode(http["body"], validate=True)),
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise Reply.error(400, f"This is no order to resume: {error!r}", code="bad_resumption") from error


class Resumptions:
    """Serves resumed requests, each with its gateway on the line. From the start they are like any other: they can be moved, too."""

    def __init__(
        self,
        engine: Engine,
        flights: Flights,
        arrivals: Arrivals,
        receptions: Receptions,
        settings: LlumletSettings,
        *,
        draining: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._flights = flights
        self._arrivals = arrivals
        self._receptions = receptions
        self._settings = settings
        self._draining = draining

    async def serve(self, resumption: Resumption, receive: Receive, send: Send) -> None:
        """Answer with the stream. What cannot go on here ends with `lost`. Raises Reply while nothing was sent."""
        leg, settings = resumption.leg, self._settings
        if self._draining():
            raise Reply.error(503, "This instance is draining; another one will take the request.", code="instance_draining")
        if resumption.http.path.partition("?")[0] not in self._engine.movable_paths:
            raise Reply.error(400, f"Requests for {resumption.http.path} cannot be resumed.", code="not_resumable")
        await self._clear_older(leg)
        replay = Replay()
        flight = Flight(leg, resumption.http, tier=resumption.tier, replay=replay, created=resumption.created)
        streams = asks_for_stream(resumption.http.body)
        exchange = Exchange(flight, ClientOutlet(receive, send), streams=streams, unwind_timeout_s=settings.unwind_timeout_s)
        try:
            with self._flights.serving(exchange):
                async with asyncio.TaskGroup() as tasks:
                    starting = tasks.create_task(self._start(exchange, replay, resumption.steps))
                    await exchange.serve(self._engine, scope_of(resumption.http))
                    starting.cancel()
        except DuplicateLeg as error:
            raise Reply.error(409, str(error), code="duplicate_request") from error
        await exchange.finish()

    async def _clear_older(self, leg: Leg) -> None:
        """What is left here of earlier epochs goes first: nobody reads it, and an engine may not know a request twice."""
        try:
            async with asyncio.timeout(self._settings.admit_timeout_s):
                await self._receptions.supersede(leg)
                await self._arrivals.drop_older(leg)
                await self._flights.wait_released(leg.request)
        except TimeoutError:
            raise Reply.error(409, f"{leg.request} is still being served here.", code="still_here") from None

    async def _start(self, exchange: Exchange, replay: Replay, steps: tuple[TokenStep, ...]) -> None:
        """Replay, and let the engine go on after the last known token: fresh tokens must not overtake known ones."""
        flight = exchange.flight
        try:
            await self._wait_shell(flight)
            if flight.unmovable is not None:
                raise Refused(f"{flight.leg} cannot be resumed", reason=flight.unmovable)
            replay.extend(steps)
            await flight.wait_history(len(steps))
            if flight.ended.is_set():
                return
            async with asyncio.timeout(self._settings.resume_timeout_s):
                await self._engine.adopt(flight.leg, steps, 0, ())
                await self._engine.activate(flight.leg, steps, 0)
            replay.finish()
        except RequestEnded:
            return  # the known tokens were all of them
        except MigrationError as error:
            log.warning("%s cannot go on here: %s", flight.leg, error)
            exchange.hand_over(lost_event(error.reason))
        except TimeoutError:
            log.warning("%s cannot go on here: the engine did not take it in time", flight.leg)
            exchange.hand_over(lost_event("timeout"))
        except Exception:  # the root of a task
            log.exception("resuming %s failed", flight.leg)
            exchange.hand_over(lost_event("internal"))

    async def _wait_shell(self, flight: Flight) -> None:
        """Return when the engine knows the request. Raises RequestEnded if its server turned it away, TimeoutError."""
        async with asyncio.timeout(self._settings.admit_timeout_s), asyncio.TaskGroup() as waiting:
            shell = waiting.create_task(flight.shell.wait())
            ended = waiting.create_task(flight.ended.wait())
            await asyncio.wait([shell, ended], return_when=asyncio.FIRST_COMPLETED)
            shell.cancel()
            ended.cancel()
        if flight.ended.is_set():
            raise RequestEnded
