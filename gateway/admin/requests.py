"""`GET /admin/requests`: every request that runs."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.composition import composition_of
from gateway.whereabouts import ask_all

router = APIRouter()


@router.get("/requests")
async def list_requests(request: Request) -> JSONResponse:
    """Every request that runs, asked of all instances now. Those that do not answer in time are named in `silent`."""
    parts = composition_of(request.scope)
    cluster = await parts.ledger.view(0.0)
    running, silent = await ask_all(parts, cluster.instances)
    rows = [{"id": row.request, "instance": row.view.id, **row.fields} for row in sorted(running, key=lambda row: row.request)]
    return JSONResponse({"requests": rows, "silent": silent})
