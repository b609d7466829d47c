"""THE streaming path, top to bottom: admit, claim, open, relay, switch, release. One frame owns all of it.

    serve ─ one request: reads the body, holds its place in the ledger, watches the client
      _run ─ tries instances until one completes the answer: anew, or going on from what the client has seen
        _ride ─ one instance's stream, and those the request moves on to
          _follow ─ one stream to its last word: whole events in, the client's bytes out, one write for each read

Nothing reaches the client before the first event of a good answer. Leaving the frame, for whatever reason, closes every
connection and gives the claim back.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from traceback import clear_frames
from typing import Any

from starlette.types import Scope

from backend.registry.instance import InstanceKind
from gateway.access.caller import Caller
from gateway.account import Account
from gateway.asked import read_request
from gateway.attachment import Attached
from gateway.attempts import Attempts, Next
from gateway.attendant import Attendant
from gateway.composition import Composition
from gateway.control import Answer, Control, ControlError, Head, Kept, Moving, parse_control
from gateway.deadline import expire
from gateway.downstream import Downstream
from gateway.errors import (
    ClientLeft,
    ClientTooSlow,
    FirstByteTimeout,
    GatewayError,
    StreamGap,
    UpstreamBroken,
    UpstreamFailed,
    UpstreamLetGo,
    UpstreamRefused,
    UpstreamSilent,
    UpstreamUnreachable,
    first_error,
)
from gateway.headers import find_header
from gateway.joint import Joint
from gateway.keeper import Keeper, Unkept
from gateway.policy.view import InstanceView
from gateway.request_log import RequestEntry
from gateway.resuming import resume_order, why_not_resumable
from gateway.seeking import seek
from gateway.sse import Decoder, Event, EventTooLong
from gateway.stored import remember_response
from gateway.stream_ends import RESPONSES, last_events
from gateway.tasks import Tasks, beside
from gateway.transcript import Transcript, Verdict
from gateway.turn import Turn, turn_of
from gateway.upstream import UpstreamResponse
from migration.leg import InstanceId, Leg, RequestId

WATCHED_AFTER_S = 0.05
"""What is over sooner needs nobody who sees its client leave."""

TAIL_S = 1.0
"""What an instance gets to close its stream in good order once the answer is complete."""


class Relay:
    """One request, from its first byte to its last."""

    def __init__(self, parts: Composition, scope: Scope, client: Downstream, caller: Caller) -> None:
        self._parts, self._settings, self._clock = parts, parts.settings, parts.clock
        self._client, self._caller, self._scope = client, caller, scope
        self._transcript = Transcript(last_events(scope["path"]))
        self._memory = parts.token_memory.share()
        self._attempts = Attempts(self._settings.max_attempts, self._settings.max_resumes)
        self._served_by = InstanceId("")
        self._head: Head | None = None
        self._attached = Attached(parts.upstream)
        self._account = Account(parts.metrics, parts.clock)
        self._read_at_s = self._account.arrived_s
        self._joint = Joint(self._read_at_s)
        self._request = RequestId("")
        self._keeper: Keeper = Unkept()
        self.tier, self.outcome = parts.policy.tiers.default, "failed"

    @property
    def used_tokens(self) -> int:
        """What the request has cost its caller so far."""
        return self._account.used_tokens

    def end(self) -> RequestEntry | None:
        """It is over; answers what the request log gets, None if the request was never understood."""
        return self._account.end(self.outcome)

    # ------------------------------------------------------------------ admit, place, watch

    async def serve(self) -> None:
        """Serve the request to its end. Errors are shown to the client; only a client that left is no error."""
        parts = self._parts
        try:
            await self._admit()
            self.tier = self._asked.tier.name
            self._account.open(self._request, self._asked)
            self._attendant = Attendant(self._client, parts.ledger, parts.settings, parts.clock, self.tier)
            placed = parts.ledger.place(self._request, self.tier, self._asked.fields.prompt_tokens)
            async with placed as self._place, Tasks() as self._tasks:
                try:
                    with beside(self._tasks, WATCHED_AFTER_S, self._watchers):
                        try:
                            await self._run()
                        except GatewayError as error:
                            await self._fail(error)
                finally:
                    self._attached.drop()
                    await self._keeper.close(self._transcript, self._place)
                    self._memory.cover(0)
        except* ClientTooSlow:
            self.outcome = "client_too_slow"
        except* ClientLeft:
            self.outcome = "client_left"
        except* GatewayError as group:
            await self._fail(first_error(group))
        finally:
            self._attempts.failure = None  # its traceback knows this relay
            parts.streams.end(self._request, self._keeper)

    def _watchers(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._attendant.run(), *self._keeper.beside(lambda: self._transcript, self._place))

    async def _admit(self) -> None:
        """Read the request, and let it in. Raises GatewayError, ClientLeft."""
        parts = self._parts
        asked = self._asked = await read_request(self._scope, self._client, self._caller, parts.settings, parts.policy.tiers)
        self._request = parts.request_ids.issue(find_header(asked.headers, b"x-request-id"))
        self._keeper, told = await parts.streams.begin(self._request, asked, self._caller.name)
        self._client.ours += (*asked.told(self._request), *told)

    async def _fail(self, error: GatewayError) -> None:
        """Show what went wrong."""
        self.outcome = error.reason
        clear_frames(error.__traceback__)  # they know the error, as it knows them
        if self._client.started:
            self._parts.metrics.broken_streams.labels(error.reason).inc()
        await self._client.fail(error)

    # ------------------------------------------------------------------ attempts

    async def _run(self) -> None:
        """Try instances until one completes the answer. Raises GatewayError."""
        try:
            async with asyncio.timeout(self._settings.first_byte_timeout_s) as self._deadline:
                while True:
                    instance = await seek(self._parts, self._place, self._asked, self._attempts, self._transcript.tokens, self._deadline)
                    try:
                        return await self._ride(instance)
                    except UpstreamFailed as failure:
                        await self._consider(failure)
        except TimeoutError:
            raise FirstByteTimeout(f"No instance gave a first byte within {self._settings.first_byte_timeout_s:g} s.") from None

    async def _consider(self, failure: UpstreamFailed) -> None:
        """What a failure means: begin anew, go on elsewhere (return), or show it (raise).

        What the client has seen is never told again: it is gone on from, or the answer ends.
        """
        self._attached.drop()
        if not isinstance(failure, UpstreamLetGo):
            await self._blame()
        if isinstance(failure, UpstreamUnreachable):
            self._parts.dispatcher.suspect(self._served_by)
        shown, why_not = self._client.started or self._attempts.came_back, self._why_not_resumable()
        decision = self._attempts.decide(failure, self._parts.clock(), shown=shown, tokens=self._transcript.tokens, why_not=why_not)
        if decision.counted:
            self._parts.metrics.resumes.outcomes.labels(*decision.counted).inc()
        if decision.next is Next.SHOW:
            raise self._attempts.failure or failure
        if decision.next is Next.ANEW:
            self._transcript, self._head, self._joint.leg = self._transcript.fresh(), None, None
            self._memory.cover(0)
            self._parts.metrics.retries.labels(failure.reason).inc()

    def _why_not_resumable(self) -> str | None:
        shown = self._client.started or self._attempts.came_back
        return why_not_resumable(self._asked.fields, self._transcript, shown=shown)

    async def _blame(self) -> None:
        self._attempts.blame(self._served_by, await self._parts.ledger.view(self._settings.view_max_age_s))

    async def _ride(self, instance: InstanceView) -> None:
        """The answer from this instance, and from those it moves on to. Returns when it is complete. Raises UpstreamFailed."""
        self._served_by = instance.id
        self._attempts.ask(instance)
        self._account.serve(instance.report.models)
        patience_s = self._settings.attempt_timeout_s
        if instance.report.kind is InstanceKind.PASSIVE and not self._asked.fields.stream:  # nothing comes before the whole answer
            patience_s = self._settings.answer_timeout_s
            self._deadline.reschedule(asyncio.get_running_loop().time() + patience_s)
        try:
            async with asyncio.timeout(patience_s) as self._patience, AsyncExitStack() as legs:
                with self._attendant.listening(instance.id, lambda: expire(self._patience)):
                    opened = await self._open(instance)
                response = await legs.enter_async_context(opened)
                if not response.is_event_stream:
                    return await self._pass_whole(response)
                if not self._client.started:
                    self._head = Head(response.status, tuple(response.headers))
                while await self._follow(response) is Turn.SWITCH:  # the old stream ends by itself; it is closed with the others
                    response = await legs.enter_async_context(await self._take_attachment())
        except TimeoutError:
            raise UpstreamSilent("The instance gave no first event in time.") from None

    async def _open(self, instance: InstanceView) -> UpstreamResponse:
        """Ask an instance to begin, or to go on with what the client has been shown."""
        asked, leg = self._asked, Leg(self._request, self._attempts.next_epoch())
        headers = asked.headers_to(instance.is_member, leg, self._parts.policy.rank_of(self.tier))
        if self._attempts.resuming is None:
            return await self._parts.upstream.post(instance.report.url, asked.target, headers, asked.body, member=instance.is_member)
        self._joint.leg = leg
        self._transcript.rejoin()
        order = resume_order(leg, self.tier, asked.target, headers, asked.body, self._transcript)
        return await self._parts.upstream.resume(instance.report.url, order)

    async def _pass_whole(self, response: UpstreamResponse) -> None:
        """An answer that is not a stream, verbatim. Raises UpstreamRefused for a 5xx."""
        body = await response.read_all(self._settings.max_answer_bytes)
        if self._attempts.resuming is not None and response.status < 500:
            raise UpstreamBroken(f"The instance does not go on with the request (status {response.status}).")
        self.outcome = "ok" if response.status < 400 else "request_refused"
        await self._answer(Answer(response.status, tuple(response.headers), body))

    # ------------------------------------------------------------------ one stream

    async def _follow(self, response: UpstreamResponse) -> Turn:
        """Relay one stream to its last word. Raises UpstreamFailed if that leaves nothing to go on with."""
        decoder = Decoder(self._settings.max_answer_bytes)
        while True:
            try:
                chunk = await self._read(response, decoder)
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
                if self._attached.epoch is None:
                    raise
                await self._blame()
                return Turn.SWITCH

    async def _read(self, response: UpstreamResponse, decoder: Decoder) -> bytes:
        """The next bytes, but for those that take the quick way."""
        is_quick = self._client.started and decoder.is_between_events and not self._patience.when()
        self._attendant.listen(self._served_by, response.close)
        try:
            return await response.read(self._pass if is_quick else None)
        finally:
            self._attendant.rest()
            self._read_at_s = self._clock()

    def _pass(self, data: bytes) -> bool:
        """The quick way: most reads bring the client's next events and nothing else. They leave as they come, and nobody wakes for it."""
        client, transcript = self._client, self._transcript
        if not client.connection.has_room or (passed := transcript.pass_on(data, self._keeper.marks)) is None:
            return False
        shown, brought = passed
        if shown:
            client.connection.write_chunk(shown)
        client.sent_at_s = self._attendant.heard_at_s = self._joint.shown_at_s = now_s = self._clock()
        if brought:
            self._count_tokens(now_s, brought)
        return True

    async def _deliver(self, events: list[Event]) -> Turn | None:
        """Hand over the client's part of what one read brought, in one write. Says if this stream is over. Raises UpstreamFailed."""
        shown: list[bytes] = []
        turn: Turn | None = None
        failure: UpstreamFailed | None = None
        for event in events:
            try:
                taken = self._take_event(event, shown)
                turn = await self._answer(taken) if isinstance(taken, Answer) else taken
            except UpstreamFailed as error:
                failure = error
            if turn or failure:
                break
        if events and self._patience.when() is not None:
            self._patience.reschedule(None)
        if shown and (self._client.started or not all(raw.startswith(b":") for raw in shown)):
            await self._start(shown[0])
            await self._client.write(b"".join(shown))
        if failure:
            raise failure
        return turn

    def _take_event(self, event: Event, shown: list[bytes]) -> Turn | Answer | None:
        """One event: the client's (then added to `shown`), or ours. Raises UpstreamFailed."""
        try:
            control = parse_control(event)
        except ControlError as error:
            raise UpstreamBroken(f"The instance sent a {error}.") from error
        if control is not None:
            return control if isinstance(control, Answer) else self._obey(control)
        if self._is_new(event) and not event.is_blank:
            shown.append(self._keeper.mark(event, self._transcript))
        return None

    def _is_new(self, event: Event) -> bool:
        """Whether the client gets this event. Raises StreamGap."""
        verdict = self._transcript.judge(event)
        if verdict is Verdict.GAP:
            raise StreamGap("The moved stream does not go on where its first part ended.")
        if verdict is Verdict.OLD:
            return False
        self._note_joint()
        self._attempts.progressed()
        if self._transcript.tokens > 0 and self._deadline.when() is not None:
            self._deadline.reschedule(None)
        self._joint.show(self._read_at_s, self._served_by)
        self._count_tokens(self._read_at_s, 1)
        return True

    def _count_tokens(self, now_s: float, events: int) -> None:
        self._memory.follow(self._transcript)
        self._account.relay(self._transcript.tokens, now_s, self._served_by, events)
        if self._place.ahead and self._transcript.tokens:
            self._tasks.create_task(self._parts.ledger.started(self._place))

    def _obey(self, control: Control) -> Turn | None:
        """React to a control event, without waiting. Raises UpstreamFailed if it leaves nothing to go on with."""
        match control:
            case Head():
                self._head = control
            case Moving(epoch) if epoch > self._attempts.epoch:
                self._attempts.announced(epoch)
                self._attached.open(self._request, control, self._tasks)
            case Kept(epoch) if epoch == self._attached.epoch:
                self._attached.drop()
        return turn_of(control, self._attached.epoch, self._why_not_resumable)

    # ------------------------------------------------------------------ switching

    async def _take_attachment(self) -> UpstreamResponse:
        """Make the attachment the stream, and its instance the one that has the claim. Raises UpstreamFailed."""
        response, self._joint.leg, self._served_by = await self._attached.take(self._settings.attach_timeout_s)
        self._attempts.epoch = self._joint.leg.epoch
        self._transcript.rejoin()
        self._parts.metrics.switches.inc()
        self._tasks.create_task(self._parts.ledger.move(self._place, self._served_by))
        return response

    def _note_joint(self) -> None:
        """The client's stream goes on at another instance: it moved there, or was resumed there."""
        if (leg := self._joint.leg) is not None:
            self._tasks.create_task(self._joint.tell(self._parts, leg, self._read_at_s, self._served_by, self._attempts.joined()))

    # ------------------------------------------------------------------ to the client

    def _begin(self, told: bytes) -> None:
        """The client is about to see its first bytes: no more attempts, no more deadline over them."""
        self._deadline.reschedule(None)
        self._patience.reschedule(None)
        queued_ms = str(round(self._place.queued_s * 1e3)).encode()
        self._client.ours += [(b"x-midstream-instance", self._served_by.encode()), (b"x-midstream-queued-ms", queued_ms)]
        if self._client.path == RESPONSES:
            self._tasks.create_task(remember_response(self._parts, RESPONSES, told, self._served_by))
        self._account.begin(self.tier, self._served_by)

    async def _start(self, told: bytes = b"") -> None:
        if self._client.started:
            return
        self._begin(told)
        head = self._head or Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
        await self._client.start(head.status, head.headers)

    async def _answer(self, answer: Answer) -> Turn:
        """The whole answer of a request that does not stream. Raises UpstreamRefused for a 5xx."""
        if self._client.started:
            raise UpstreamBroken("The instance sent a second answer.")
        if answer.status >= 500:
            raise UpstreamRefused(answer.status, answer.headers, answer.body)
        self._transcript.complete = True
        self._note_joint()
        self._begin(answer.body)
        await self._client.answer(answer.status, answer.headers, answer.body)
        return Turn.COMPLETE

    async def _close(self, response: UpstreamResponse) -> Turn:
        """The client has everything: let the instance end its stream in good order, and end the client's."""
        self.outcome = "ok"
        self._parts.line.note_answer(self._account.complete())
        await response.read_out(TAIL_S)
        if not self._client.finished:
            await self._start()
            await self._client.finish()
        return Turn.COMPLETE
