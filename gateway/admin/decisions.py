"""`GET /admin/decisions`: why requests were placed and moved as they were."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.composition import composition_of
from gateway.decisions import KINDS
from gateway.errors import MalformedQuery

USUAL_LIMIT = 100

router = APIRouter()


@router.get("/decisions")
async def list_decisions(request: Request) -> JSONResponse:
    """The latest first. `kind`, `request` and `limit` narrow them."""
    query = request.query_params
    kind, limit = query.get("kind"), query.get("limit", str(USUAL_LIMIT))
    if kind is not None and kind not in KINDS:
        raise MalformedQuery(f"`kind` must be one of: {', '.join(KINDS)}.", param="kind")
    if not (limit.isascii() and limit.isdecimal() and 0 < len(limit) < 7):
        raise MalformedQuery("`limit` must be a number.", param="limit")
    found = composition_of(request.scope).decisions.find(kind, query.get("request"), int(limit))
    return JSONResponse({"decisions": [noted.to_json() for noted in found]})
