"""Serving a request whose gateway is on the line."""

from starlette.types import Receive, Scope, Send

from backend.engine.base import Engine
from backend.engine.flight import Flight
from backend.llumlet.exchange import Exchange
from backend.llumlet.flights import DuplicateLeg, Flights
from backend.llumlet.incoming import TIER_HEADER, ClientLeft, asks_for_stream, header, original, rank_of, read_body, read_leg
from backend.llumlet.outlet import ClientOutlet
from backend.llumlet.reply import Reply
from backend.llumlet.settings import LlumletSettings


async def serve_departing(
    scope: Scope, receive: Receive, send: Send, *, engine: Engine, flights: Flights, settings: LlumletSettings
) -> None:
    """Read the body once, and serve it as a flight that may leave for another instance while it is read here."""
    try:
        leg = read_leg(scope)
        body = await read_body(receive, settings.max_body_bytes)
    except ClientLeft:
        return
    except Reply as reply:
        await reply(scope, receive, send)
        return
    http = original(scope, body)
    flight = Flight(leg, http, tier=header(scope, TIER_HEADER) or "normal", rank=rank_of(http))
    outlet = ClientOutlet(receive, send)
    exchange = Exchange(flight, outlet, streams=asks_for_stream(body), unwind_timeout_s=settings.unwind_timeout_s)
    try:
        with flights.serving(exchange):
            await exchange.serve(engine, dict(scope))
        await exchange.finish()
    except DuplicateLeg as error:
        await Reply.error(409, str(error), code="duplicate_request")(scope, receive, send)
