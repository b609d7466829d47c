"""The llumlet's own HTTP routes, under /midstream/."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.types import Receive, Scope, Send

from backend.llumlet.arrival import Arrivals
from backend.llumlet.attachment import serve_attachment
from backend.llumlet.choices import Choices
from backend.llumlet.drain import Drain
from backend.llumlet.evacuation import Evacuation
from backend.llumlet.exchange import Exchange
from backend.llumlet.fence import Fence, StaleToken
from backend.llumlet.flights import Flights
from backend.llumlet.incoming import ClientLeft, leg_of, read_body
from backend.llumlet.metrics import LlumletMetrics
from backend.llumlet.migrations import Migrations, UnknownRequest
from backend.llumlet.releases import Releases
from backend.llumlet.reply import Reply
from backend.llumlet.reporter import Reporter
from backend.llumlet.resumption import Resumptions, read_resumption
from migration.codec import message_from_json, to_json
from migration.errors import ProtocolError
from migration.leg import InstanceId, RequestId
from migration.plan import Destination, MigrationMode, MigrationPlan
from migration.question import Answer, Question
from migration.reception import Receptions

PREFIX = "/midstream/"
_STREAMS = "/midstream/streams/"
_RESUME = "/midstream/resume"
MESSAGE_LIMIT_BYTES = 1024**3  # a message carries a request's body and tokens; only a peer sends it


class Routes:
    """Answers /midstream/*; nothing else."""

    def __init__(
        self,
        *,
        flights: Flights,
        arrivals: Arrivals,
        receptions: Receptions,
        resumptions: Resumptions,
        migrations: Migrations,
        choices: Choices,
        releases: Releases,
        reporter: Reporter,
        metrics: LlumletMetrics,
        drain: Drain,
        evacuation: Evacuation,
    ) -> None:
        self._flights = flights
        self._arrivals = arrivals
        self._receptions = receptions
        self._resumptions = resumptions
        self._migrations = migrations
        self._choices = choices
        self._releases = releases
        self._fence = Fence()
        self._reporter = reporter
        self._metrics = metrics
        self._drain = drain
        self._evacuation = evacuation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"].startswith(_STREAMS) and scope["method"] == "GET":
                await self._stream(scope, receive, send)
                return
            if (scope["method"], scope["path"]) == ("POST", _RESUME):
                await self._resume(receive, send)
                return
            reply = await self._reply(scope, receive)
        except ClientLeft:
            return
        except Reply as raised:
            reply = raised
        await reply(scope, receive, send)

    async def _resume(self, receive: Receive, send: Send) -> None:
        await self._resumptions.serve(read_resumption(await _read_json(receive)), receive, send)

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        match scope["method"], scope["path"].removeprefix(PREFIX):
            case "GET", "load":
                return Reply(200, self._reporter.report().to_json().encode())
            case "GET", "requests":
                return Reply.json({"requests": [self._describe(exchange) for exchange in self._flights]})
            case "GET", "metrics":
                return self._render_metrics()
            case "POST", "messages":
                return await self._message(await _read_json(receive))
            case "POST", "migrations":
                return await self._migrate(await _read_json(receive))
            case "POST", "choices":
                return await self._ask(self._choices.answer, await _read_json(receive))
            case "POST", "release":
                return await self._ask(self._releases.answer, await _read_json(receive))
            case "POST", "fence":
                return self._raise_fence(await _read_json(receive))
            case "GET", "drain":
                return self._describe_drain()
            case "POST", "drain":
                self._drain.begin()
                return self._describe_drain()
            case "POST", "undrain":
                return self._take_back()
        return Reply.error(404, f"There is no {scope['method']} {scope['path']} here.", code="not_found")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        leg = leg_of(scope["path"].removeprefix(_STREAMS), _query(scope).get("epoch", ""))
        buffer = self._arrivals.stream(leg)
        if buffer is None:
            raise Reply.error(404, f"{leg.request}, epoch {leg.epoch}, is not known here.", code="unknown_leg")
        await serve_attachment(buffer, scope, receive, send)

    async def _message(self, body: Any) -> Reply:
        try:
            message = message_from_json(body)
        except ProtocolError as error:
            return Reply.error(400, str(error), code=error.reason)
        return Reply.json(to_json(await self._receptions.answer(message)))

    async def _migrate(self, body: Any) -> Reply:
        plan = _plan(body)
        if (token := body.get("token")) is not None:
            self._admit(token)
        try:
            outcome = await self._migrations.run(plan)
        except UnknownRequest as error:
            return Reply.error(404, str(error), code="request_not_found")
        return Reply.json(asdict(outcome))

    async def _ask(self, answer: Callable[[Question], Awaitable[Answer]], body: Any) -> Reply:
        try:
            question = Question.from_json(body)
        except ValueError as error:
            return Reply.error(400, str(error), code="bad_question")
        self._admit(question.token)
        return Reply.json((await answer(question)).to_json())

    def _raise_fence(self, body: Any) -> Reply:
        self._admit(body.get("token") if isinstance(body, dict) else None)
        return Reply.json({"token": self._fence.token})

    def _admit(self, token: object) -> None:
        """Raises a Reply: 409 for the token of a lease that was lost."""
        if type(token) is not int or token < 0:
            raise Reply.error(400, "token is the number of the order's lease.", code="bad_token")
        try:
            self._fence.pass_through(token)
        except StaleToken as error:
            raise Reply.error(409, f"{error}.", code="stale_token") from None

    def _take_back(self) -> Reply:
        if not self._drain.take_back():
            return Reply.error(409, "This instance is about to stop.", code="instance_leaving")
        return self._describe_drain()

    def _describe_drain(self) -> Reply:
        here = {exchange.flight.leg for exchange in self._flights} | self._arrivals.legs
        return Reply.json(
            {
                "state": self._drain.state.value,
                "elapsed_s": round(self._drain.elapsed_s, 3),
                "remaining": len(here),
                "requests": [asdict(departed) for departed in self._evacuation.departed],
            }
        )

    def _render_metrics(self) -> Reply:
        self._metrics.flights.set(len(self._flights))
        self._metrics.migrations_in.set(self._receptions.arriving)
        self._metrics.migrations_out.set(len(self._migrations))
        return Reply(200, self._metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8")

    def _describe(self, exchange: Exchange) -> dict[str, object]:
        flight = exchange.flight
        return {
            "request": flight.leg.request,
            "epoch": flight.leg.epoch,
            "tier": flight.tier,
            "output_tokens": len(flight.history),
            "prompt_tokens": flight.prompt_tokens,
            "state": self._state(exchange),
            "unmovable": flight.unmovable,
        }

    def _state(self, exchange: Exchange) -> str:
        flight = exchange.flight
        if flight.ended.is_set():
            return "ended"
        if flight.replay is not None and not flight.replay.finished:
            return "arriving"
        if self._migrations.is_moving(flight.leg.request):
            return "moving"
        return "decoding" if flight.history else "waiting"


async def _read_json(receive: Receive) -> Any:
    try:
        return json.loads(await read_body(receive, MESSAGE_LIMIT_BYTES))
    except (ValueError, RecursionError):
        raise Reply.error(400, "The body is not JSON.", code="malformed_json") from None


def _plan(body: Any) -> MigrationPlan:
    match body:
        case {"request": str(request), "destination": {"instance": str(instance), "url": str(url)}}:
            try:
                mode = MigrationMode(body.get("mode", "live"))
            except ValueError:
                raise Reply.error(400, "mode is one of live, stop_copy, recompute.", code="bad_mode") from None
            only_waiting = body.get("only_waiting") is True
            return MigrationPlan(RequestId(request), Destination(InstanceId(instance), url.rstrip("/")), mode, only_waiting)
    raise Reply.error(400, 'Expected {"request": ..., "destination": {"instance": ..., "url": ...}}.', code="bad_plan")


def _query(scope: Scope) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in scope.get("query_string", b"").decode("latin-1").split("&"))
    return {name: value for name, _, value in pairs}
