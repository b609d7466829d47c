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
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from backend.engine.base import Engine
from backend.llumlet.arrival import Arrivals
from backend.llumlet.choices import Choices
from backend.llumlet.drain import Drain
from backend.llumlet.evacuation import Evacuation
from backend.llumlet.flights import Flights
from backend.llumlet.guard import Guard
from backend.llumlet.link import Links
from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.middleware import Llumlet
from backend.llumlet.migrations import Migrations
from backend.llumlet.releases import Releases
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
        self._front: Guard | None = None
        self.flights = Flights()
        self.arrivals: Arrivals | None = None
        self.drain = Drain(deadline_s=settings.drain_deadline_s, retry_after_s=settings.drain_retry_after_s, clock=clock)
        self.failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        assert self._front is not None, "served before its lifespan began"
        await self._front(scope, receive, send)

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
                Arrivals(engine, flights, settings, draining=lambda: self.drain.draining, clock=self._clock)
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
            evacuation = Evacuation(
                self.drain, flights, migrations, self._store, settings, models=lambda: engine.load().models, clock=self._clock
            )
            resumptions = Resumptions(engine, flights, arrivals, receptions, settings, draining=lambda: self.drain.draining)
            self.drain.watch(lambda: reporter.changed(urgent=True))
            choices = Choices(engine, flights, migrations, self._clock)
            routes = Routes(
                flights=flights,
                arrivals=arrivals,
                receptions=receptions,
                resumptions=resumptions,
                migrations=migrations,
                choices=choices,
                releases=Releases(choices, flights),
                reporter=reporter,
                metrics=metrics,
                drain=self.drain,
                evacuation=evacuation,
            )
            llumlet = Llumlet(engine, settings, flights=flights, routes=routes, drain=self.drain)
            self._front = Guard(llumlet, settings)
            background = [
                tasks.create_task(reporter.run()),
                tasks.create_task(evacuation.run()),
                tasks.create_task(self._leave(flights, arrivals, migrations)),
            ]
            yield
            migrations.cancel_all()
            for task in background:
                task.cancel()

    async def _leave(self, flights: Flights, arrivals: Arrivals, migrations: Migrations) -> None:
        async def wait_idle() -> None:
            while len(flights) or len(arrivals):
                await flights.wait_empty()
                await arrivals.wait_empty()

        async def give_up() -> None:
            """Each stream ends with `released`, from which its gateway goes on elsewhere if it can; a reader gets a moment to take it."""
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.shutdown_timeout_s):
                    await migrations.stop()
                    for exchange in flights:
                        if not exchange.handed_over:
                            exchange.release("drained")
                    await wait_idle()

        await self.drain.run(wait_idle=wait_idle, give_up=give_up)
        self._stop()
