"""THE streaming path, top to bottom: admit, claim, open, relay, switch, release. One frame owns all of it.

    serve ─ one request: reads the body, holds its place in the ledger, watches the client
      _run ─ tries instances until one gives a first byte
        _ride ─ one instance's stream, and those the request moves on to
          _follow ─ one stream to its last word: whole events in, the client's bytes out, one write for each read

Nothing reaches the client before the first event of a good answer. Leaving the frame, for whatever reason, closes every
connection and gives the claim back.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from enum import Enum, auto

from starlette.types import Scope

from gateway.attachment import Attachment
from gateway.attainment import Attainment
from gateway.composition import Composition
from gateway.control import Answer, Control, ControlError, Head, Kept, Lost, Moved, Moving, parse_control
from gateway.downstream import Downstream
from gateway.errors import (
    ClientLeft,
    FirstByteTimeout,
    GatewayError,
    NoInstance,
    StreamGap,
    UpstreamBroken,
    UpstreamFailed,
    UpstreamRefused,
    UpstreamSilent,
    UpstreamUnreachable,
)
from gateway.headers import find_header, request_headers
from gateway.openai import BodyFields, read_body
from gateway.policy.view import InstanceView
from gateway.priority import choose_tier
from gateway.sse import Decoder, Event, EventTooLong
from gateway.transcript import Transcript, Verdict
from gateway.upstream import UpstreamResponse
from migration.leg import InstanceId, Leg, RequestId

log = logging.getLogger("midstream.gateway.relay")

TAIL_S = 1.0
"""What an instance gets to close its stream in good order once the answer is complete."""


class Turn(Enum):
    """How a stream ended."""

    COMPLETE = auto()
    SWITCH = auto()
    """Go on with the attachment."""


class Relay:
    """One request, from its first byte to its last."""

    def __init__(self, parts: Composition, scope: Scope, client: Downstream) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._client = client
        self._raw_headers = tuple(scope["headers"])
        query = scope["query_string"]
        self._target = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
        self._arrived_s = parts.clock()
        self._transcript = Transcript()
        self._tried: set[InstanceId] = set()
        self._failure: UpstreamFailed | None = None
        self._epoch = 0
        self._head: Head | None = None
        self._attachment: Attachment | None = None
        self._response: UpstreamResponse | None = None
        self._reading_since_s: float | None = None
        self._event_at_s = self._arrived_s
        self._gap_leg: Leg | None = None
        self._left: InstanceId | None = None
        self._attainment = Attainment(parts.metrics, self._arrived_s)
        self.tier = parts.policy.tiers.default
        self.outcome = "failed"

    # ------------------------------------------------------------------ admit, place, watch

    async def serve(self) -> None:
        """Serve the request to its end. Errors are shown to the client; only a client that left is no error."""
        settings = self._settings
        try:
            declared = find_header(self._raw_headers, b"content-length")
            self._body = await self._client.read_body(declared, settings.max_body_bytes, settings.body_timeout_s)
            self._fields: BodyFields = read_body(self._body)
            self._choice = choose_tier(self._raw_headers, self._fields, self._parts.policy.tiers)
            self.tier = self._choice.tier.name
            self._request = self._issue_id()
            place = self._parts.ledger.place(self._request, self.tier, self._fields.prompt_tokens)
            async with place as self._place, asyncio.TaskGroup() as self._tasks:
                attendant = self._tasks.create_task(self._attend())
                try:
                    await self._show()
                finally:
                    attendant.cancel()
                    self._drop_attachment()
        except* ClientLeft:
            self.outcome = "client_left"
        except* GatewayError as group:
            await self._fail(_first(group))

    def _issue_id(self) -> RequestId:
        wanted = find_header(self._raw_headers, b"x-request-id")
        request = self._parts.request_ids.issue(wanted)
        self._client.ours += [(b"x-request-id", request.encode()), (b"x-midstream-tier", self.tier.encode())]
        if self._choice.note is not None:
            self._client.ours.append((b"x-midstream-tier-note", self._choice.note.encode()))
        return request

    async def _show(self) -> None:
        """Run; show what went wrong."""
        try:
            await self._run()
        except GatewayError as error:
            await self._fail(error)

    async def _fail(self, error: GatewayError) -> None:
        self.outcome = error.reason
        if self._client.started:
            self._parts.metrics.broken_streams.labels(error.reason).inc()
        await self._client.fail(error)

    async def _attend(self) -> None:
        """The request's second task: sees the client leave, keeps an idle stream open, and cuts off an instance that fell silent."""
        settings = self._settings
        tick_s = min(t for t in (settings.keepalive_interval_s, settings.idle_timeout_s / 2) if t > 0)
        while True:
            try:
                async with asyncio.timeout(tick_s):
                    await self._client.wait_left()
                if not self._client.finished:
                    raise ClientLeft
                return
            except TimeoutError:
                now_s = self._parts.clock()
            if self._response and self._reading_since_s is not None and now_s - self._reading_since_s > settings.idle_timeout_s:
                self._response.close()
            if settings.keepalive_interval_s and now_s - self._client.sent_at_s >= settings.keepalive_interval_s:
                await self._client.keep_alive()

    # ------------------------------------------------------------------ attempts

    async def _run(self) -> None:
        """Try instances until one completes the answer. Raises GatewayError."""
        try:
            async with asyncio.timeout(self._settings.first_byte_timeout_s) as self._deadline:
                while True:
                    instance = await self._choose()
                    try:
                        return await self._ride(instance)
                    except UpstreamFailed as failure:
                        self._consider(instance.id, failure)
        except TimeoutError:
            raise FirstByteTimeout(f"No instance gave a first byte within {self._settings.first_byte_timeout_s:g} s.") from None

    async def _choose(self) -> InstanceView:
        """Time in line counts towards its tier's patience, and not towards the deadline of the first byte."""
        queued_s, deadline_s = self._place.queued_s, self._deadline.when()
        if self._choice.tier.sheddable and not self._deadline.expired():
            self._deadline.reschedule(None)
        try:
            return await self._parts.dispatcher.choose(self._place, self._fields.model, frozenset(self._tried))
        except NoInstance:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            if deadline_s is not None and self._deadline.when() is None:
                self._deadline.reschedule(deadline_s + self._place.queued_s - queued_s)

    def _consider(self, instance: InstanceId, failure: UpstreamFailed) -> None:
        """The one place where it is decided what a failure means: go on elsewhere (return), or show it (raise).

        Restarting is open while the client has seen nothing. Going on from `transcript.token_ids` belongs here too.
        """
        self._tried.add(instance)
        self._failure = failure
        self._drop_attachment()
        if isinstance(failure, UpstreamUnreachable):
            self._parts.dispatcher.suspect(self._served_by)
        if self._client.started or self._transcript.tokens > 0 or len(self._tried) >= self._settings.max_attempts:
            raise failure
        self._transcript, self._head, self._epoch, self._gap_leg = Transcript(), None, 0, None
        self._parts.metrics.retries.labels(failure.reason).inc()

    async def _ride(self, instance: InstanceView) -> None:
        """The answer from this instance, and from those it moves on to. Returns when it is complete. Raises UpstreamFailed."""
        self._served_by = instance.id
        headers = request_headers(self._raw_headers, self._request, self.tier, self._parts.policy.rank_of(self.tier))
        try:
            async with asyncio.timeout(self._settings.attempt_timeout_s) as self._patience, AsyncExitStack() as legs:
                opened = await self._parts.upstream.post(instance.report.url, self._target, headers, self._body)
                response = await legs.enter_async_context(opened)
                if not response.is_event_stream:
                    return await self._pass_whole(response)
                self._head = Head(response.status, tuple(response.headers))
                while await self._follow(response) is Turn.SWITCH:  # the old stream ends by itself; it is closed with the others
                    response = await legs.enter_async_context(await self._take_attachment())
        except TimeoutError:
            raise UpstreamSilent("The instance gave no first event in time.") from None

    async def _pass_whole(self, response: UpstreamResponse) -> None:
        """An answer that is not a stream, verbatim. Raises UpstreamRefused for a 5xx."""
        body = await response.read_all(self._settings.max_answer_bytes)
        if response.status >= 500:
            raise UpstreamRefused(response.status, response.headers, body)
        self._begin()
        self.outcome = "ok" if response.status < 400 else "request_refused"
        await self._client.answer(response.status, response.headers, body)

    # ------------------------------------------------------------------ one stream

    async def _follow(self, response: UpstreamResponse) -> Turn:
        """Relay one stream to its last word. Raises UpstreamFailed if that leaves nothing to go on with."""
        decoder = Decoder(self._settings.max_answer_bytes)
        while True:
            try:
                chunk = await self._read(response)
                turn = await self._deliver(decoder.feed(chunk) if chunk else decoder.finish())
                if self._transcript.complete:
                    return await self._close(response)
                if turn is not None:
                    return turn
                if not chunk:
                    raise UpstreamBroken("The instance ended the stream before the answer was complete.")
            except EventTooLong as error:
                raise UpstreamBroken(f"The instance sent {error}.") from error
            except UpstreamBroken:
                if self._attachment is None:
                    raise
                return Turn.SWITCH

    async def _read(self, response: UpstreamResponse) -> bytes:
        self._response = response
        self._reading_since_s = self._parts.clock()
        try:
            return await response.read()
        finally:
            self._response = self._reading_since_s = None

    async def _deliver(self, events: list[Event]) -> Turn | None:
        """Hand over the client's part of what one read brought, in one write. Says if this stream is over. Raises UpstreamFailed."""
        shown: list[bytes] = []
        turn: Turn | None = None
        failure: UpstreamFailed | None = None
        for event in events:
            try:
                turn = await self._take_event(event, shown)
            except UpstreamFailed as error:
                failure = error
            if turn or failure:
                break
        if events and self._patience.when() is not None:
            self._patience.reschedule(None)
        if shown and (self._client.started or not all(raw.startswith(b":") for raw in shown)):
            if not self._client.started:
                await self._start()
            await self._client.write(b"".join(shown))
        if failure:
            raise failure
        return turn

    async def _take_event(self, event: Event, shown: list[bytes]) -> Turn | None:
        """One event: the client's (then added to `shown`), or ours. Raises UpstreamFailed."""
        try:
            control = parse_control(event)
        except ControlError as error:
            raise UpstreamBroken(f"The instance sent a {error}.") from error
        if isinstance(control, Answer):
            return await self._answer(control)
        if control is not None:
            return self._obey(control)
        if self._is_new(event) and not event.is_blank:
            shown.append(event.raw)
        return None

    def _is_new(self, event: Event) -> bool:
        """Whether the client gets this event. Raises StreamGap."""
        verdict = self._transcript.judge(event)
        if verdict is Verdict.GAP:
            raise StreamGap("The moved stream does not go on where its first part ended.")
        if verdict is Verdict.OLD:
            return False
        now_s = self._parts.clock()
        if self._gap_leg is not None:
            self._tasks.create_task(self._note_gap(self._gap_leg, now_s - self._event_at_s))
            self._gap_leg = None
        if self._transcript.tokens > 0 and self._deadline.when() is not None:
            self._deadline.reschedule(None)
        if self._transcript.tokens > 0 and self._attainment.note_token(self._choice.tier, now_s) and self._place.ahead:
            self._tasks.create_task(self._parts.ledger.started(self._place))
        self._event_at_s = now_s
        return True

    def _obey(self, control: Control) -> Turn | None:
        """React to a control event, without waiting. Raises UpstreamBroken if it leaves nothing to go on with."""
        match control:
            case Head():
                self._head = control
            case Moving(epoch) if epoch > self._epoch:
                self._drop_attachment()
                self._attachment = Attachment(self._parts.upstream, self._request, control, self._tasks)
            case Kept(epoch) if self._attachment is not None and self._attachment.leg.epoch == epoch:
                self._drop_attachment()
            case Moved(epoch) if self._attachment is None or self._attachment.leg.epoch != epoch:
                raise UpstreamBroken("The request moved to an instance that was not announced.")
            case Lost() if self._attachment is None:
                raise UpstreamBroken("The instance lost the request.")
            case Moved() | Lost():
                return Turn.SWITCH
        return None

    # ------------------------------------------------------------------ switching

    async def _take_attachment(self) -> UpstreamResponse:
        """Make the attachment the stream, and its instance the one that has the claim. Raises UpstreamFailed."""
        attachment = self._attachment
        if attachment is None:
            raise UpstreamBroken("The request moved to an instance that was not announced.")
        self._tried.add(attachment.instance)
        self._left, self._served_by = self._served_by, attachment.instance
        response = await attachment.take(self._settings.attach_timeout_s)
        self._attachment = None
        self._epoch = attachment.leg.epoch
        self._transcript.rejoin()
        self._gap_leg = attachment.leg
        self._parts.metrics.switches.inc()
        self._tasks.create_task(self._parts.ledger.move(self._place, attachment.instance))
        return response

    async def _note_gap(self, leg: Leg, gap_s: float) -> None:
        self._parts.metrics.switch_gap_s.observe(gap_s)
        told = {"request": leg.request, "epoch": leg.epoch, "source": self._left, "destination": self._served_by}
        self._parts.events.publish("switch", {**told, "gap_ms": round(gap_s * 1e3, 3)})
        await self._parts.ledger.record_switch(leg, gap_s * 1e3)

    def _drop_attachment(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    # ------------------------------------------------------------------ to the client

    def _begin(self) -> None:
        """The client is about to see its first byte: no more attempts, no more deadline over them."""
        self._deadline.reschedule(None)
        self._patience.reschedule(None)
        self._client.ours.append((b"x-midstream-instance", self._served_by.encode()))
        self._client.ours.append((b"x-midstream-queued-ms", str(round(self._place.queued_s * 1e3)).encode()))
        self._parts.metrics.first_byte_s.labels(self.tier).observe(self._parts.clock() - self._arrived_s)

    async def _start(self) -> None:
        self._begin()
        head = self._head or Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
        await self._client.start(head.status, head.headers)

    async def _answer(self, answer: Answer) -> Turn:
        """The whole answer of a request that does not stream."""
        if self._client.started:
            raise UpstreamBroken("The instance sent a second answer.")
        self._transcript.complete = True
        self._begin()
        await self._client.answer(answer.status, answer.headers, answer.body)
        return Turn.COMPLETE

    async def _close(self, response: UpstreamResponse) -> Turn:
        """The client has everything: let the instance end its stream in good order, and end the client's."""
        self.outcome = "ok"
        self._attainment.note_end(self._choice.tier, self._transcript.tokens, self._parts.clock())
        self._parts.line.note_answer(self._transcript.tokens)
        try:
            async with asyncio.timeout(TAIL_S):
                while await response.read():
                    pass
        except (TimeoutError, UpstreamFailed) as error:
            log.debug("an instance did not end its stream in good order: %r", error)
        if not self._client.finished:
            await self._client.finish()
        return Turn.COMPLETE


def _first(group: BaseExceptionGroup[GatewayError]) -> GatewayError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
