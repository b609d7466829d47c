"""The public routes: the OpenAI endpoints, /health and /metrics. They hand over, and do nothing else."""

import asyncio
import contextlib
import logging

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.composition import Composition, composition_of
from gateway.downstream import Downstream
from gateway.errors import GatewayError, ModelNotFound, ShuttingDown
from gateway.headers import find_header
from gateway.metrics import CONTENT_TYPE
from gateway.openai import read_tier
from gateway.policy.view import ClusterView, ViewState
from gateway.protocol import abort_of
from gateway.relay import Relay

RELAYED_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Requests that are relayed, and can be moved."""

PARTING_S = 0.5
"""What a client that does not read gets, at most, to take the last word of a gateway that stops."""

log = logging.getLogger("midstream.gateway")
router = APIRouter()


class RelayEndpoint:
    """A raw ASGI app: the root of one request's task. Nothing of a framework stands between the engine's bytes and the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = composition_of(scope)
        client = Downstream(receive, send, parts.clock, write_timeout_s=parts.settings.write_timeout_s, abort=abort_of(scope))
        arrived_s = parts.clock()
        with contextlib.ExitStack() as place:
            caller = await _admit(parts, scope, client, place)
            if caller is not None:
                await self._relay(parts, client, Relay(parts, scope, client, caller), caller, arrived_s)

    async def _relay(self, parts: Composition, client: Downstream, relay: Relay, caller: Caller, arrived_s: float) -> None:
        try:
            await relay.serve()
        except asyncio.CancelledError:
            relay.outcome = ShuttingDown.code
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PARTING_S):
                    await client.fail(ShuttingDown("The gateway is shutting down."))
            raise
        except Exception:
            relay.outcome = GatewayError.code
            log.exception("a request failed in the gateway")
            await client.fail(GatewayError())
        finally:
            parts.metrics.requests.labels(relay.tier, relay.outcome).inc()
            parts.metrics.duration_s.labels(relay.tier).observe(parts.clock() - arrived_s)
            await caller.settle(relay.used_tokens)


async def _admit(parts: Composition, scope: Scope, client: Downstream, place: contextlib.ExitStack) -> Caller | None:
    """Who asks, in his place among the requests that are served; None if he was turned away, before his body was read."""
    try:
        caller = parts.gate.identify(scope)
        place.enter_context(parts.gate.occupied())
        await caller.begin()
    except GatewayError as error:
        tier, _ = read_tier(find_header(scope["headers"], b"priority"))
        parts.metrics.requests.labels(tier, error.reason).inc()
        await client.fail(error)
        return None
    return caller


def relayed_routes() -> list[Route]:
    """The routes of the streaming path."""
    return [Route(path, RelayEndpoint(), methods=["POST"]) for path in RELAYED_PATHS]


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    """The models of all instances that are for the caller, merged."""
    parts = composition_of(request.scope)
    caller = parts.gate.identify(request.scope)
    cluster = await parts.ledger.view(0.0)
    cards = [card for card in _model_cards(cluster, parts.started_s) if caller.may_see(str(card["id"]))]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> JSONResponse:
    """One model."""
    parts = composition_of(request.scope)
    caller = parts.gate.identify(request.scope)
    cluster = await parts.ledger.view(0.0)
    for card in _model_cards(cluster, parts.started_s):
        if card["id"] == model and caller.may_see(model):
            return JSONResponse(card)
    raise ModelNotFound(f"The model '{model}' does not exist.", param="model")


@router.get("/health")
async def show_health(request: Request) -> JSONResponse:
    """Alive. Says how many instances are ready, and if the store answers."""
    parts = composition_of(request.scope)
    cluster = await parts.ledger.view(0.0)
    ready = sum(view.state is ViewState.READY for view in cluster.instances)
    is_well = ready > 0 and parts.ledger.is_store_up
    store = "up" if parts.ledger.is_store_up else "down"
    return JSONResponse({"status": "ok" if is_well else "degraded", "instances": ready, "store": store})


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(composition_of(request.scope).metrics.render(), media_type=CONTENT_TYPE)


def _model_cards(cluster: ClusterView, created_s: int) -> list[dict[str, object]]:
    lengths: dict[str, int] = {}
    for view in cluster.instances:
        for model in view.report.models:
            lengths[model] = max(lengths.get(model, 0), view.report.max_model_tokens)
    return [
        {"id": model, "object": "model", "created": created_s, "owned_by": "midstream", "max_model_len": tokens}
        for model, tokens in sorted(lengths.items())
    ]
