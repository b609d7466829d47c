"""The operator's routes: what instances there are, what runs where, what happens, and orders to move a request."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from backend.registry.store import StoreError
from gateway.composition import Composition, composition_of
from gateway.errors import (
    AdminClosed,
    GatewayError,
    MalformedOrder,
    NoOtherInstance,
    RequestNotFound,
    Unauthorized,
    UpstreamBroken,
    UpstreamFailed,
)
from gateway.events import GatewayEvent, Subscription
from gateway.policy.view import InstanceView, RequestView
from migration.leg import InstanceId, Leg, RequestId
from migration.plan import Destination, MigrationMode, MigrationOutcome, MigrationPlan, MigrationResult

SWITCH_POLL_S = 0.02
FAREWELL_S = 1.0
"""What a listener of the event feed gets, when the gateway stops, to take its end."""


def require_admin(request: Request) -> None:
    """Raise Unauthorized or AdminClosed unless the caller may use /admin."""
    settings = composition_of(request.scope).settings
    secret = settings.admin_secret
    if secret is None:
        if not settings.listens_on_loopback:
            raise AdminClosed("Set an admin token to use /admin on an address that others can reach.")
        return
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {secret}".encode()):
        raise Unauthorized("The admin token is missing or wrong.")


router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)])


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request as its instance tells it."""

    request: RequestId
    view: InstanceView
    fields: dict[str, object]


@router.get("/instances")
async def list_instances(request: Request) -> JSONResponse:
    """Every instance as this gateway sees it."""
    cluster = await composition_of(request.scope).ledger.view(0.0)
    return JSONResponse({"instances": [_describe(view) for view in cluster.instances]})


@router.get("/requests")
async def list_requests(request: Request) -> JSONResponse:
    """Every request that runs, asked of all instances now. Those that do not answer in time are named in `silent`."""
    parts = composition_of(request.scope)
    cluster = await parts.ledger.view(0.0)
    running, silent = await _ask_all(parts, cluster.instances)
    rows = [{"id": row.request, "instance": row.view.id, **row.fields} for row in sorted(running, key=lambda row: row.request)]
    return JSONResponse({"requests": rows, "silent": silent})


@router.get("/events")
async def follow_events(request: Request) -> EventSourceResponse:
    """What happens from now on, as server-sent events, until the listener leaves or the gateway stops."""
    parts = composition_of(request.scope)
    subscription = parts.events.open()
    stopping = anyio.Event()

    async def close_when_stopping() -> None:
        await stopping.wait()
        subscription.close()

    return EventSourceResponse(
        _told(parts, subscription),
        sep="\n",
        ping=parts.settings.keepalive_interval_s,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        data_sender_callable=close_when_stopping,
        shutdown_event=stopping,
        shutdown_grace_period=FAREWELL_S,
    )


async def _told(parts: Composition, subscription: Subscription) -> AsyncIterator[ServerSentEvent]:
    """First the instances as they are; between that look and listening nothing is awaited, so no change is missed."""
    known = await parts.watch.look()
    with parts.events.listening(subscription):
        states = [{"id": instance, "state": state} for instance, state in known.items()]
        event: GatewayEvent | None = GatewayEvent(0, "instances", {"instances": states})
        while event is not None:
            yield ServerSentEvent(json.dumps(event.fields), event=event.kind, id=str(event.number) if event.number else None)
            event = await subscription.next()


@router.post("/migrations")
async def migrate(request: Request) -> JSONResponse:
    """Move one request; answers when it is over."""
    parts = composition_of(request.scope)
    order = _Order.read(await request.body())
    running = await _locate(parts, order.request)
    destination = await _choose_destination(parts, running, order.destination)
    told = {"request": order.request, "source": running.view.id, "destination": destination.instance, "mode": order.mode.value}
    parts.events.publish("migration_ordered", told)
    try:
        outcome = await _carry_out(parts, MigrationPlan(order.request, destination, order.mode), running.view)
    except GatewayError as error:
        parts.events.publish("migration_ended", {"outcome": error.reason, "result": MigrationResult.FAILED.value, **told})
        raise
    moved = outcome.result is MigrationResult.MOVED
    ended = {
        "outcome": outcome.result.value if moved else outcome.reason or outcome.result.value,
        "result": outcome.result.value,
        **told,
        "stages": outcome.stages,
        "bytes": outcome.bytes,
        "downtime_ms": await _wait_downtime(parts, Leg(order.request, outcome.epoch)) if moved else None,
        "frozen_ms": outcome.frozen_ms,
        "total_ms": outcome.total_ms,
    }
    parts.events.publish("migration_ended", ended)
    return JSONResponse(ended)


@dataclass(frozen=True, slots=True)
class _Order:
    request: RequestId
    destination: InstanceId | None
    mode: MigrationMode

    @staticmethod
    def read(body: bytes) -> "_Order":
        """Raises MalformedOrder."""
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise MalformedOrder(f"The body is not valid JSON: {error}") from error
        match raw:
            case {"request": str(request)} if request:
                destination, mode = raw.get("destination"), raw.get("mode", MigrationMode.LIVE)
            case _:
                raise MalformedOrder("`request` must be the id of a request.", param="request")
        if destination is not None and not isinstance(destination, str):
            raise MalformedOrder("`destination` must be the id of an instance.", param="destination")
        if mode not in list(MigrationMode):
            raise MalformedOrder(f"`mode` must be one of: {', '.join(MigrationMode)}.", param="mode")
        return _Order(RequestId(request), InstanceId(destination) if destination else None, MigrationMode(mode))


async def _ask_all(parts: Composition, views: Sequence[InstanceView]) -> tuple[list[RunningRequest], list[InstanceId]]:
    async with asyncio.TaskGroup() as tasks:
        asked = [(view, tasks.create_task(_ask_one(parts, view))) for view in views]
    answers = [(view, task.result()) for view, task in asked]
    return [row for _, rows in answers if rows is not None for row in rows], [view.id for view, rows in answers if rows is None]


async def _ask_one(parts: Composition, view: InstanceView) -> list[RunningRequest] | None:
    """None if the instance does not answer."""
    try:
        raw = await parts.upstream.get_json(f"{view.report.url}/midstream/requests", parts.settings.admin_timeout_s)
    except UpstreamFailed:
        return None
    rows = raw.get("requests") if isinstance(raw, dict) else None
    if not isinstance(rows, list):
        return None
    return [
        RunningRequest(RequestId(str(row["request"])), view, {key: value for key, value in row.items() if key != "request"})
        for row in rows
        if isinstance(row, dict) and "request" in row
    ]


async def _locate(parts: Composition, request: RequestId) -> RunningRequest:
    """Where the request runs: where its claim is, or else wherever it is found. Raises RequestNotFound."""
    cluster = await parts.ledger.view(0.0)
    try:
        claimed_at = next((claim.instance for claim in await parts.ledger.claims() if claim.request == request), None)
    except StoreError:
        claimed_at = None
    likely = [view for view in cluster.instances if view.id == claimed_at]
    others = [view for view in cluster.instances if view.id != claimed_at]
    for views in (likely, others):
        running, _ = await _ask_all(parts, views)
        found = [row for row in running if row.request == request]
        if found:
            return max(found, key=lambda row: epoch if isinstance(epoch := row.fields.get("epoch"), int) else 0)
    raise RequestNotFound(f"No instance runs a request '{request}'.", param="request")


async def _choose_destination(parts: Composition, running: RunningRequest, wanted: InstanceId | None) -> Destination:
    """The wanted instance, or the policy's best. Raises NoOtherInstance."""
    source = running.view.id
    if wanted is None:
        models = running.view.report.models
        view = await parts.dispatcher.choose_destination(
            source, RequestView(running.request, models[0] if models else None, "normal", 0, frozenset((source,)))
        )
    else:
        found = (await parts.ledger.view(0.0)).find(wanted)
        if found is None or wanted == source:
            raise NoOtherInstance(f"'{wanted}' is not another instance.", param="destination")
        view = found
    return Destination(view.id, view.report.url)


async def _carry_out(parts: Composition, plan: MigrationPlan, source: InstanceView) -> MigrationOutcome:
    """Order the migration from the source. Raises UpstreamFailed."""
    question = {
        "request": plan.request,
        "destination": {"instance": plan.destination.instance, "url": plan.destination.url},
        "mode": plan.mode.value,
    }
    raw = await parts.upstream.post_json(f"{source.report.url}/midstream/migrations", question, parts.settings.migration_timeout_s)
    match raw:
        case {"result": str(result), "reason": str(reason), "epoch": int(epoch), **rest} if result in list(MigrationResult):
            stages, size, frozen_ms, total_ms = (rest.get(key, 0) for key in ("stages", "bytes", "frozen_ms", "total_ms"))
            if (
                isinstance(stages, int)
                and isinstance(size, int)
                and isinstance(frozen_ms, int | float)
                and isinstance(total_ms, int | float)
            ):
                return MigrationOutcome(MigrationResult(result), reason, epoch, stages, size, frozen_ms, total_ms)
    raise UpstreamBroken("The instance's answer is not a migration's outcome.")


async def _wait_downtime(parts: Composition, leg: Leg) -> float | None:
    """The gap that the relay of the request measured at its client; None if it has not told within the bound."""
    try:
        async with asyncio.timeout(parts.settings.switch_wait_s):
            while True:
                gap_ms = await parts.ledger.switch_gap_ms(leg)
                if gap_ms is not None:
                    return round(gap_ms, 3)
                await asyncio.sleep(SWITCH_POLL_S)
    except TimeoutError:
        return None


def _describe(view: InstanceView) -> dict[str, object]:
    report = view.report
    return {
        "id": view.id,
        "state": view.state.value,
        "model": report.models[0] if report.models else None,
        "models": list(report.models),
        "url": report.url,
        "engine": report.engine,
        "capacity_tokens": report.capacity_tokens,
        "free_tokens": report.free_tokens,
        "running": report.running,
        "waiting": report.waiting,
        "waiting_tokens": report.waiting_tokens,
        "claims": view.claims,
        "claimed_tokens": view.claimed_tokens,
        "tiers": {name: {"running": load.running, "tokens": load.tokens} for name, load in report.tiers},
        "preemptions": report.preemptions,
        "migrations_in": report.migrations_in,
        "migrations_out": report.migrations_out,
        "max_batch": report.max_batch,
        "max_model_tokens": report.max_model_tokens,
        "age_s": round(view.age_s, 3),
    }
