"""`POST /admin/migrations`: move one request."""

import json
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.composition import Composition, composition_of
from gateway.errors import MalformedOrder, NoOtherInstance
from gateway.mover import move
from gateway.policy.view import RequestView
from gateway.whereabouts import RunningRequest, locate
from migration.leg import InstanceId, RequestId
from migration.plan import Destination, MigrationMode, MigrationPlan

router = APIRouter()


@router.post("/migrations")
async def migrate(request: Request) -> JSONResponse:
    """Move one request; answers when it is over."""
    parts = composition_of(request.scope)
    order = _Order.read(await request.body())
    running = await locate(parts, order.request)
    destination = await _choose_destination(parts, running, order.destination)
    return JSONResponse(await move(parts, MigrationPlan(order.request, destination, order.mode), running.view))


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
        if found is None or wanted == source or not found.can_move:
            raise NoOtherInstance(f"'{wanted}' is not another instance that takes moved requests.", param="destination")
        view = found
    return Destination(view.id, view.report.url)
