"""Instances that come and go on an operator's order: `/admin/scale-out`, `/admin/scale-in`, `/admin/operations`, drain and undrain."""

import json
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.composition import Composition, composition_of
from gateway.errors import MalformedOrder
from gateway.policy.view import InstanceView
from gateway.scaling.choice import choose_departures
from gateway.scaling.errors import InstanceNotFound, LauncherFailed, OrderConflict
from gateway.scaling.http_launcher import HttpLauncher
from gateway.scaling.launcher import Launched, LauncherError
from gateway.scaling.llumlets import DrainStatus
from gateway.scaling.operation import Operation
from migration.leg import InstanceId
from migration.typed_json import encode

MAX_COUNT = 100
ORIGIN = "admin"

router = APIRouter()


@router.post("/scale-out")
async def scale_out(request: Request) -> JSONResponse:
    """Start instances; answers with the operation that does it."""
    parts = composition_of(request.scope)
    _launcher(parts)
    match await _read_order(request, {"count", "model"}):
        case {"count": int(count), **rest} if 1 <= count <= MAX_COUNT and count is not True:
            model = rest.get("model")
        case _:
            raise MalformedOrder(f"`count` must be a number from 1 to {MAX_COUNT}.", param="count")
    if model is not None and not (isinstance(model, str) and model):
        raise MalformedOrder("`model` must be the name of a model.", param="model")
    return _accepted(await parts.scaling.operations.order_out(count, model, ORIGIN))


@router.post("/scale-in")
async def scale_in(request: Request) -> JSONResponse:
    """Drain and stop instances; answers with the operation that does it, which may be an earlier one."""
    parts = composition_of(request.scope)
    launcher = _launcher(parts)
    match await _read_order(request, {"count", "instance"}):
        case {"instance": str(name), **rest} if name and not rest:
            return await _scale_in_one(parts, launcher, InstanceId(name))
        case {"count": int(count), **rest} if 1 <= count <= MAX_COUNT and count is not True and not rest:
            chosen = await _choose(parts, launcher, count)
            return _accepted(await parts.scaling.operations.order_in(chosen, ORIGIN))
    raise MalformedOrder(f"Either `instance`, the id of one, or `count`, a number from 1 to {MAX_COUNT}, is needed.")


@router.get("/operations")
async def list_operations(request: Request) -> JSONResponse:
    """All that are running, and those of late, the newest first; without their steps."""
    operations = await composition_of(request.scope).scaling.operations.all()
    return JSONResponse({"operations": [_summary(each) for each in operations]})


@router.get("/operations/{operation}")
async def show_operation(request: Request, operation: str) -> JSONResponse:
    """One, with its steps and what became of each request."""
    return JSONResponse(_described(await composition_of(request.scope).scaling.operations.find(operation)))


@router.delete("/operations/{operation}")
async def cancel_operation(request: Request, operation: str) -> JSONResponse:
    """Undo what can still be undone."""
    return JSONResponse(_described(await composition_of(request.scope).scaling.operations.cancel(operation)), 202)


@router.post("/instances/{instance}/drain")
async def drain(request: Request, instance: str) -> JSONResponse:
    """No new requests for it; those it has move away. It goes on running."""
    parts = composition_of(request.scope)
    view = await _instance(parts, InstanceId(instance))
    return JSONResponse(_drain_status(view, await parts.scaling.llumlets.drain(view)))


@router.post("/instances/{instance}/undrain")
async def undrain(request: Request, instance: str) -> JSONResponse:
    """It takes requests again."""
    parts = composition_of(request.scope)
    view = await _instance(parts, InstanceId(instance))
    operation = (await parts.scaling.operations.live()).of_instance(view.id)
    if operation is not None:
        raise OrderConflict(f"Operation {operation.id} is at work on '{instance}': cancel that.", "operation_running")
    status = await parts.scaling.llumlets.undrain(view)
    if status is None:
        raise OrderConflict(f"'{instance}' is about to stop.", "instance_leaving")
    return JSONResponse(_drain_status(view, status))


async def _read_order(request: Request, known: set[str]) -> dict[str, object]:
    """The body's fields. Raises MalformedOrder."""
    try:
        raw = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise MalformedOrder(f"The body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise MalformedOrder("The body must be a JSON object.")
    if unknown := sorted(set(raw) - known):
        raise MalformedOrder(f"Unknown field `{unknown[0]}`.", param=unknown[0])
    return {name: value for name, value in raw.items() if value is not None}


def _launcher(parts: Composition) -> HttpLauncher:
    if parts.scaling.launcher is None:
        raise OrderConflict("No launcher is set (MIDSTREAM_LAUNCHER_URL), so nothing can be started or stopped.", "no_launcher")
    return parts.scaling.launcher


async def _scale_in_one(parts: Composition, launcher: HttpLauncher, instance: InstanceId) -> JSONResponse:
    known = (await parts.scaling.operations.live()).of_instance(instance)
    if known is None:
        launched = {each.instance: each for each in await _launched(launcher)}
        if instance not in launched:
            await _instance(parts, instance)
            raise OrderConflict(f"'{instance}' was not started by the launcher.", "not_launched", param="instance")
        if not launched[instance].stoppable:
            raise OrderConflict(f"The launcher cannot stop '{instance}' before others.", "not_stoppable", param="instance")
    return _accepted(await parts.scaling.operations.order_in([instance], ORIGIN))


async def _choose(parts: Composition, launcher: HttpLauncher, count: int) -> Sequence[InstanceId]:
    cluster = await parts.ledger.view(0.0)
    book = await parts.scaling.operations.live()
    chosen = choose_departures(cluster, await _launched(launcher), book.busy, count)
    if len(chosen) < count:
        raise OrderConflict(f"Only {len(chosen)} instances can be stopped now.", "not_enough_instances", param="count")
    return chosen


async def _launched(launcher: HttpLauncher) -> Sequence[Launched]:
    try:
        return await launcher.list()
    except LauncherError as error:
        raise LauncherFailed(str(error)) from error


async def _instance(parts: Composition, instance: InstanceId) -> InstanceView:
    view = (await parts.ledger.view(0.0)).find(instance)
    if view is None:
        raise InstanceNotFound(f"There is no instance '{instance}'.")
    return view


def _accepted(operation: Operation) -> JSONResponse:
    return JSONResponse({"operation": operation.id}, 202)


def _summary(operation: Operation) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(operation, name) for name in ("id", "origin", "created", "model", "state")}
    return {**fields, "kind": operation.kind.value, "instances": encode(operation.subjects)}


def _described(operation: Operation) -> dict[str, object]:
    return {**_summary(operation), "steps": encode(operation.steps), "requests": encode(operation.requests)}


def _drain_status(view: InstanceView, status: DrainStatus) -> dict[str, object]:
    return {
        "id": view.id,
        "state": status.state,
        "elapsed_s": status.elapsed_s,
        "remaining": status.remaining,
        "requests": encode(status.requests),
    }
