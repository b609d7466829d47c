"""`GET /admin/events`: what happens, as it happens."""

import json
from collections.abc import AsyncIterator

import anyio
from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from gateway.composition import Composition, composition_of
from gateway.events import GatewayEvent, Subscription

FAREWELL_S = 1.0
"""What a listener of the event feed gets, when the gateway stops, to take its end."""

router = APIRouter()


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
