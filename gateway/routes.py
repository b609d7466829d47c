"""The public routes: the OpenAI endpoints, /health and /metrics. They hand over, and do nothing else."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.client_connection import connection_of
from gateway.composition import Composition, composition_of
from gateway.downstream import Downstream
from gateway.errors import GatewayError, ModelNotFound, ShuttingDown
from gateway.metrics import CONTENT_TYPE
from gateway.passthrough import GET_PATHS, POST_PATHS, Passage
from gateway.policy.view import ClusterView, ViewState
from gateway.priority import choose_tier_of_headers
from gateway.reconnection import Reconnection
from gateway.relay import Relay
from gateway.request_log import RequestEntry
from gateway.responses import ResponsesExchange
from gateway.stream_ends import RESPONSES

RELAYED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
"""Requests that are relayed, and can be moved; those for responses are, as far as they can be."""

METRICS_AGE_S = 0.5
"""What the instances that /metrics tells of may have changed since they were looked at."""

PARTING_S = 0.5
"""What a client that does not read gets, at most, to take the last word of a gateway that stops."""

log = logging.getLogger("midstream.gateway")
router = APIRouter()


class Exchange(Protocol):
    """One request being served: relayed, or passed through."""

    outcome: str

    @property
    def tier(self) -> str:
        """Its tier's name."""

    @property
    def used_tokens(self) -> int:
        """What it has cost its caller so far."""

    async def serve(self) -> None:
        """To its end."""

    def end(self) -> RequestEntry | None:
        """It is over; answers what the request log gets, if anything."""


class Endpoint:
    """A raw ASGI app: the root of one request's task. Nothing of a framework stands between the engine's bytes and the client."""

    def __init__(self, exchange: Callable[[Composition, Scope, Downstream, Caller], Exchange]) -> None:
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = composition_of(scope)
        limit_s = parts.settings.write_timeout_s
        client = Downstream(receive, send, parts.clock, scope["path"], write_timeout_s=limit_s, connection=connection_of(scope))
        arrived_s = parts.clock()
        with contextlib.ExitStack() as place:
            caller = await _admit(parts, scope, client, place)
            if caller is not None:
                await self._serve(parts, client, self._exchange(parts, scope, client, caller), caller, arrived_s)

    async def _serve(self, parts: Composition, client: Downstream, exchange: Exchange, caller: Caller, arrived_s: float) -> None:
        try:
            await exchange.serve()
        except asyncio.CancelledError:
            exchange.outcome = ShuttingDown.code
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PARTING_S):
                    await client.fail(ShuttingDown("The gateway is shutting down."))
            raise
        except Exception:
            exchange.outcome = GatewayError.code
            log.exception("a request failed in the gateway")
            await client.fail(GatewayError())
        finally:
            metrics = parts.metrics
            metrics.labelled(metrics.requests, exchange.tier, exchange.outcome).inc()
            metrics.labelled(metrics.duration_s, exchange.tier).observe(parts.clock() - arrived_s)
            await caller.settle(exchange.used_tokens)
            entry = exchange.end()
            if entry is not None:
                parts.request_log.write(entry)


async def _admit(parts: Composition, scope: Scope, client: Downstream, place: contextlib.ExitStack) -> Caller | None:
    """Who asks, in his place among the requests that are served; None if he was turned away, before his body was read."""
    try:
        caller = parts.gate.identify(scope)
        place.enter_context(parts.gate.occupied())
        await caller.begin()
    except GatewayError as error:
        tier = choose_tier_of_headers(scope["headers"], parts.policy.tiers).tier.name
        parts.metrics.requests.labels(tier, error.reason).inc()
        await client.fail(error)
        return None
    return caller


def direct_endpoints() -> Mapping[str, ASGIApp]:
    """By path: what answers a POST there without the framework in between."""
    return {path: Endpoint(Relay) for path in RELAYED_PATHS} | {RESPONSES: Endpoint(ResponsesExchange)}


def relayed_routes() -> list[Route]:
    """The routes of the streaming path (for the methods that they do not serve), and those that are passed through."""
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in direct_endpoints().items()),
        Route("/v1/streams/{stream}", Endpoint(Reconnection), methods=["GET"]),
        *(Route(path, Endpoint(Passage), methods=["POST"]) for path in POST_PATHS),
        *(Route(path, Endpoint(Passage), methods=["GET"]) for path in GET_PATHS),
    ]


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    """The models of all instances that are for the caller, merged."""
    parts = composition_of(request.scope)
    caller = parts.gate.identify(request.scope)
    cluster = await parts.ledger.view(0.0)
    cards = [card for card in _model_cards(cluster, parts) if caller.may_see(str(card["id"]))]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> JSONResponse:
    """One model."""
    parts = composition_of(request.scope)
    caller = parts.gate.identify(request.scope)
    cluster = await parts.ledger.view(0.0)
    for card in _model_cards(cluster, parts):
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
    parts = composition_of(request.scope)
    cluster = await parts.ledger.view(METRICS_AGE_S)
    parts.metrics.forget_others({view.id for view in cluster.instances})
    return Response(parts.metrics.render(), media_type=CONTENT_TYPE)


def _model_cards(cluster: ClusterView, parts: Composition) -> list[dict[str, object]]:
    """The models of all instances, and the aliases of those that are there."""
    lengths: dict[str, int] = {}
    for view in cluster.instances:
        for model in view.report.models:
            lengths[model] = max(lengths.get(model, 0), view.report.max_model_tokens)
    names = {model: model for model in lengths} | {
        alias: model for alias, model in parts.settings.aliases.items() if model in lengths and alias not in lengths
    }
    return [
        {
            "id": name,
            "object": "model",
            "created": parts.started_s,
            "owned_by": "midstream",
            "root": model,
            "max_model_len": lengths[model] or None,
        }
        for name, model in sorted(names.items())
    ]
