"""`GET /admin/instances`: every instance as this gateway sees it."""

from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.composition import composition_of
from gateway.policy.view import InstanceView

router = APIRouter()


@router.get("/instances")
async def list_instances(request: Request) -> JSONResponse:
    """Every instance as this gateway sees it."""
    cluster = await composition_of(request.scope).ledger.view(0.0)
    return JSONResponse({"instances": [_describe(view) for view in cluster.instances]})


def _describe(view: InstanceView) -> dict[str, object]:
    report = view.report
    return {
        "id": view.id,
        "state": view.state.value,
        "kind": report.kind.value,
        "is_measured": report.is_measured,
        "model": report.models[0] if report.models else None,
        "models": list(report.models),
        "url": report.url,
        "engine": report.engine,
        "capacity_tokens": report.capacity_tokens,
        "block_tokens": report.block_tokens,
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
        "cost": asdict(report.cost),
        "age_s": round(view.age_s, 3),
    }
