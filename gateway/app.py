"""The composition root: builds the app, and in its lifespan everything the app is made of. Two apps can live in one process."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any, TypedDict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from backend.peers.signer import Signer
from backend.registry.address import MEMORY
from backend.registry.memory import MemoryStore
from backend.registry.redis import RedisStore
from backend.registry.store import InstanceStore
from gateway import routes
from gateway.access.gate import Gate
from gateway.access.keyfile import KeyFile
from gateway.access.limiter import Limiter
from gateway.admin.router import admin_router
from gateway.composition import Composition
from gateway.decisions import LOGGED, DecisionLog
from gateway.dispatcher import Dispatcher
from gateway.errors import GatewayError, MalformedBody, MethodNotAllowed, NotFound
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.passive.roster import PassiveRoster
from gateway.passive.watcher import PassiveWatch
from gateway.policy.config import Policy
from gateway.policy.dispatch import DispatchPolicy
from gateway.policy.line import Immediate
from gateway.rebalancer import Rebalancer
from gateway.request_ids import RequestIds
from gateway.request_log import RequestLog, open_request_log
from gateway.scaling.parts import build_scaling
from gateway.settings import GatewaySettings
from gateway.shared_events import SharedEvents
from gateway.streams import Streams
from gateway.suspects import Suspects
from gateway.token_memory import TokenMemory
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


def build_app(
    settings: GatewaySettings, store: InstanceStore | None = None, dispatch: DispatchPolicy | None = None, policy: Policy | None = None
) -> FastAPI:
    """The gateway as an ASGI app. A store that is given stays the caller's; else the one in the settings is opened and closed here.

    `policy` takes the place of the one in the settings; with a `dispatch` policy that one places requests, at once. Raises BadKeys.
    """
    rules = policy or settings.build_policy()
    if dispatch is not None:
        rules = replace(rules, dispatch=dispatch, line=Immediate(dispatch))
    keys = open_keys(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[State]:
        async with (
            _store_of(settings, store) as shared,
            _open_upstream(settings) as upstream,
            open_request_log(settings.request_log, time.monotonic) as request_log,
        ):
            parts = compose(settings, shared, upstream, rules, keys, request_log)
            loops = [parts.ledger.keep(), parts.ledger.look_beside(), parts.watch.keep(), parts.passive.keep()]
            shared_events = SharedEvents(parts.events, parts.ledger, settings)
            loops += [shared_events.tell(), shared_events.hear()]
            loops += [parts.line.keep(), parts.line.hear(), parts.line.renew(), *parts.scaling.keepers()]
            if settings.rebalance:
                loops.append(Rebalancer(parts, shared.leases, rules).keep())
            if keys is not None:
                loops.append(keys.keep())
            async with asyncio.TaskGroup() as tasks:
                keepers = [tasks.create_task(loop) for loop in loops]
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


def compose(
    settings: GatewaySettings,
    store: InstanceStore,
    upstream: Upstream,
    policy: Policy,
    keys: KeyFile | None,
    request_log: RequestLog,
) -> Composition:
    """Wire the parts."""
    clock = time.monotonic  # the event loop's own may tick in whole milliseconds
    metrics = Metrics(CollectorRegistry(), settings.prometheus_dir)
    ledger = Ledger(store, settings, clock, metrics)
    metrics.show_cluster(ledger.last_view)
    decisions = DecisionLog(settings.decisions_kept, logged=LOGGED[settings.log_decisions], metrics=metrics)
    suspects = Suspects(clock, settings.suspect_s)
    line = Line(ledger, policy, suspects, settings, clock, metrics, decisions)
    dispatcher = Dispatcher(ledger, line, policy, suspects, settings, clock, metrics, Random(), decisions)
    events = EventFeed(settings.max_queued_events)
    watch = InstanceWatch(ledger, events)
    scaling = build_scaling(settings, store, upstream, ledger, line, events, metrics.scaling, clock)
    limiter = Limiter(store.rates, clock, timeout_s=settings.store_timeout_s, retry_s=settings.store_retry_s)
    gate = Gate(keys, limiter, [tier.name for tier in sorted(policy.tiers.tiers, key=lambda tier: tier.rank)], settings.max_streams)
    roster = PassiveRoster(settings.passive_backends, store.records)
    passive = PassiveWatch(roster, store, upstream, ledger, dispatcher, settings, clock)
    memory = TokenMemory(settings.max_remembered_tokens, settings.max_remembered_request_tokens, metrics.resumes.remembered_tokens)
    return Composition(
        settings=settings,
        policy=policy,
        gate=gate,
        ledger=ledger,
        line=line,
        dispatcher=dispatcher,
        upstream=upstream,
        metrics=metrics,
        request_log=request_log,
        request_ids=RequestIds(),
        events=events,
        decisions=decisions,
        watch=watch,
        scaling=scaling,
        passive=passive,
        token_memory=memory,
        streams=Streams(store.streams, ledger, settings, clock, policy.tiers),
        clock=clock,
        started_s=int(datetime.now(UTC).timestamp()),
    )


def open_keys(settings: GatewaySettings) -> KeyFile | None:
    """The API keys in force; None if nobody needs one. Raises BadKeys."""
    if settings.api_keys_file is None:
        return None
    keys = KeyFile(settings.api_keys_file, settings.api_keys_poll_s)
    keys.open()
    return keys


def _open_upstream(settings: GatewaySettings) -> AbstractAsyncContextManager[Upstream]:
    return Upstream.open(settings.connect_timeout_s, Signer(settings.fleet_secrets), settings.tls.for_client())


@asynccontextmanager
async def _store_of(settings: GatewaySettings, given: InstanceStore | None) -> AsyncIterator[InstanceStore]:
    if given is not None:
        yield given
        return
    store: InstanceStore
    if settings.store_url == MEMORY:
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
