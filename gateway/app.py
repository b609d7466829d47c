"""The composition root: builds the app, and in its lifespan everything the app is made of. Two apps can live in one process."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from typing import Any, TypedDict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore
from gateway import routes
from gateway.admin.router import admin_router
from gateway.composition import Composition
from gateway.dispatcher import Dispatcher
from gateway.errors import GatewayError, MalformedBody, MethodNotAllowed, NotFound
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.passive.roster import PassiveRoster
from gateway.passive.watcher import PassiveWatch
from gateway.policy.dispatch import DispatchPolicy, LeastLoaded
from gateway.request_ids import RequestIds
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from gateway.watch import InstanceWatch


class State(TypedDict):
    """What the lifespan hands to every request."""

    composition: Composition


class GatewayApp(FastAPI):
    """Routes of the streaming path go straight to their endpoint: each event would else pass through every layer of the framework."""

    def __init__(self, direct: Mapping[str, ASGIApp], lifespan: Lifespan[Any]) -> None:
        super().__init__(title="Midstream", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (endpoint := self._direct.get(scope["path"])) is not None:
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build_app(settings: GatewaySettings, store: InstanceStore | None = None, policy: DispatchPolicy | None = None) -> FastAPI:
    """The gateway as an ASGI app. A store that is given stays the caller's; else the one in the settings is opened and closed here."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[State]:
        async with _store_of(settings, store) as shared, Upstream.open(settings.connect_timeout_s) as upstream:
            parts = compose(settings, shared, upstream, policy or LeastLoaded())
            async with asyncio.TaskGroup() as tasks:
                keepers = [
                    tasks.create_task(parts.ledger.keep()),
                    tasks.create_task(parts.watch.keep()),
                    tasks.create_task(parts.passive.keep()),
                ]
                yield {"composition": parts}
                for keeper in keepers:
                    keeper.cancel()

    app = GatewayApp(routes.direct_endpoints(), lifespan)
    app.include_router(routes.router)
    app.include_router(admin_router())
    app.router.routes.extend(routes.relayed_routes())
    app.add_exception_handler(GatewayError, _show_error)
    app.add_exception_handler(HTTPException, _show_error)
    app.add_exception_handler(RequestValidationError, _show_error)
    return app


def compose(settings: GatewaySettings, store: InstanceStore, upstream: Upstream, policy: DispatchPolicy) -> Composition:
    """Wire the parts."""
    clock = time.monotonic  # the event loop's own may tick in whole milliseconds
    metrics = Metrics(CollectorRegistry(), settings.metrics_dir)
    ledger = Ledger(store, settings, clock, metrics)
    dispatcher = Dispatcher(ledger, policy, settings, clock, Random())
    events = EventFeed(settings.max_queued_events)
    watch = InstanceWatch(ledger, events)
    roster = PassiveRoster(settings.passive_backends, store.records)
    passive = PassiveWatch(roster, store, upstream, ledger, dispatcher, settings, clock)
    started_s = int(datetime.now(UTC).timestamp())
    return Composition(settings, ledger, dispatcher, upstream, metrics, RequestIds(), events, watch, passive, clock, started_s)


@asynccontextmanager
async def _store_of(settings: GatewaySettings, given: InstanceStore | None) -> AsyncIterator[InstanceStore]:
    if given is not None:
        yield given
        return
    store: InstanceStore
    if settings.store_url == "memory://":
        store = MemoryStore(asyncio.get_running_loop().time)
    else:
        store = RedisStore(settings.store_url, timeout_s=settings.store_timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def _show_error(request: Request, error: Exception) -> Response:
    """Every error before the first byte, in OpenAI's shape."""
    shown = _translated(error, request)
    return Response(shown.body(), shown.status, {key.decode(): value.decode() for key, value in shown.headers()})


def _translated(error: Exception, request: Request) -> GatewayError:
    match error:
        case GatewayError():
            return error
        case HTTPException(status_code=404):
            return NotFound(f"Nothing is served at {request.method} {request.url.path}.")
        case HTTPException(status_code=405):
            return MethodNotAllowed(f"{request.method} is not served at {request.url.path}.")
        case RequestValidationError():
            return MalformedBody(str(error))
        case _:
            return GatewayError()
