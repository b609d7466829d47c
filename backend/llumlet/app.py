"""The composition root of a backend: one ASGI app that is the engine's OpenAI server with the llumlet in front.

    app = build(engine, settings, store, stop=...)   # nothing runs yet
    uvicorn.Server(uvicorn.Config(app, ...))         # the app's lifespan enters engine.running(), starts reporting, and so on

`engine.openai_app` and `engine.movable_paths` are read only after `engine.running()` was entered, so an engine may build its app
there. The lifespan of `engine.openai_app`, if it has one, is part of `engine.running()`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.types import Receive, Scope, Send

from backend.engine.base import Engine
from backend.llumlet.arrival import Arrivals
from backend.llumlet.drain import Drain
from backend.llumlet.flights import Flights
from backend.llumlet.link import Links
from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.middleware import Llumlet
from backend.llumlet.migrations import Migrations
from backend.llumlet.reporter import Reporter
from backend.llumlet.resumption import Resumptions
from backend.llumlet.routes import Routes
from backend.llumlet.settings import LlumletSettings
from backend.registry.instance import InstanceState
from backend.registry.store import InstanceStore
from migration.reception import Receptions

log = logging.getLogger(__name__)


def build(
    engine: Engine,
    settings: LlumletSettings,
    store: InstanceStore,
    *,
    stop: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> "BackendApp":
    """The ASGI app. `settings.advertised_url` must be set by now. `store` stays the caller's to close.

    `stop` is called when the process should exit: because it is drained, or because something of it died (`app.failed`).
    """
    if not settings.advertised_url:
        raise ValueError("advertised_url is needed: the base URL under which this instance is reached")
    return BackendApp(engine, settings, store, stop=stop or (lambda: None), clock=clock)


class BackendApp:
    """Holds what runs between lifespan start-up and shutdown."""

    def __init__(
        self, engine: Engine, settings: LlumletSettings, store: InstanceStore, *, stop: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._store = store
        self._stop = stop
        self._clock = clock
        self._llumlet: Llumlet | None = None
        self.flights = Flights()
        self.arrivals: Arrivals | None = None
        self.drain = Drain(deadline_s=settings.drain_deadline_s, retry_after_s=settings.drain_retry_after_s)
        self.failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        assert self._llumlet is not None, "served before its lifespan began"
        await self._llumlet(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        phase = "startup"
        try:
            async with self._running():
                phase = "shutdown"
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            log.exception("the backend failed in its %s", "start-up" if phase == "startup" else "life")
            self.failed = True
            self._stop()
            await send({"type": f"lifespan.{phase}.failed", "message": repr(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        engine, settings, metrics, flights = self._engine, self._settings, LlumletMetrics(), self.flights
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(engine.running())
            links = await stack.enter_async_context(Links(settings))
            arrivals = self.arrivals = await stack.enter_async_context(
                Arrivals(engine, flights, settings, draining=lambda: self.drain.draining)
            )
            receptions = await stack.enter_async_context(Receptions(engine, arrivals, settings.reception(), self._clock))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            reporter = Reporter(
                engine,
                self._store,
                settings,
                metrics,
                incarnation=secrets.token_hex(8),
                state=lambda: InstanceState.DRAINING if self.drain.draining else InstanceState.READY,
                moves=lambda: (receptions.arriving, len(migrations)),
            )
            migrations = Migrations(
                engine, flights, links, settings, metrics, tasks=tasks, clock=self._clock, changed=lambda: reporter.changed(urgent=True)
            )
            resumptions = Resumptions(engine, flights, arrivals, receptions, settings, draining=lambda: self.drain.draining)
            routes = Routes(
                flights=flights,
                arrivals=arrivals,
                receptions=receptions,
                resumptions=resumptions,
                migrations=migrations,
                reporter=reporter,
                metrics=metrics,
            )
            self._llumlet = Llumlet(engine, settings, flights=flights, routes=routes, drain=self.drain)
            background = [
                tasks.create_task(reporter.run()),
                tasks.create_task(self._drain(reporter, flights, arrivals)),
            ]
            yield
            migrations.cancel_all()
            for task in background:
                task.cancel()

    async def _drain(self, reporter: Reporter, flights: Flights, arrivals: Arrivals) -> None:
        async def wait_idle() -> None:
            while len(flights) or len(arrivals):
                await flights.wait_empty()
                await arrivals.wait_empty()

        await self.drain.run(begun=lambda: reporter.changed(urgent=True), wait_idle=wait_idle)
        self._stop()
