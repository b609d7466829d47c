"""`POST /admin/instances` and `DELETE /admin/instances/{id}`: passive backends come and go."""

import json

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from backend.registry.store import StoreError
from gateway.composition import composition_of
from gateway.errors import InstanceNotFound, MalformedOrder, StoreUnavailable
from gateway.passive.reading import Passive, passive_at
from migration.leg import InstanceId

router = APIRouter()


@router.post("/instances")
async def add_backend(request: Request) -> JSONResponse:
    """Watch a plain OpenAI server, and use it as soon as it answers."""
    parts = composition_of(request.scope)
    passive = _ordered(await request.body())
    try:
        await parts.passive.roster.add(passive)
    except StoreError as error:
        raise StoreUnavailable("The shared store does not answer.") from error
    return JSONResponse({"id": passive.id, "url": passive.url, "kind": "passive"}, 201)


@router.delete("/instances/{instance:path}")
async def remove_backend(request: Request, instance: str) -> JSONResponse:
    """Send nothing more there. Requests that run there go on to their end."""
    parts = composition_of(request.scope)
    try:
        if not await parts.passive.roster.remove(InstanceId(instance)):
            raise InstanceNotFound(f"No passive backend is called '{instance}'.")
        await parts.passive.withdraw(InstanceId(instance))
    except StoreError as error:
        raise StoreUnavailable("The shared store does not answer.") from error
    return JSONResponse({"id": instance, "removed": True})


def _ordered(body: bytes) -> Passive:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedOrder(f"The body is not valid JSON: {error}") from error
    url = raw.get("url") if isinstance(raw, dict) else None
    if not isinstance(url, str):
        raise MalformedOrder("`url` must be the base URL of an OpenAI server.", param="url")
    try:
        return passive_at(url)
    except ValueError as error:
        raise MalformedOrder(f"{error}.", param="url") from error
