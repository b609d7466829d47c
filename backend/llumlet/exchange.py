"""One request being served: the engine's own handler runs, and what it sends goes, stamped, to an outlet.

The same for a request whose gateway is on the line and for one that arrived from elsewhere; it may be moved away from either.

    engine's handler --send--> [cut into events, cursor, `created`] --> outlet
    a migration      --say---> [control event, between two events ] --> outlet
"""

import asyncio
import contextvars
import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Scope

from backend.engine.base import Engine
from backend.engine.flight import Flight, current_flight
from backend.llumlet.names import Names
from backend.llumlet.outlet import Head, Outlet
from backend.llumlet.wire import (
    EventSplitter,
    EventStamper,
    answer_event,
    error_body,
    find_created,
    progress_events,
    released_event,
    replace_created,
)

log = logging.getLogger(__name__)


class Exchange:
    """Serves one flight: `serve`, then `finish`.

    Ends when the handler does, when the client leaves, or when the request was handed over. `streams`: whether the request asked for
    an event stream.
    """

    def __init__(self, flight: Flight, outlet: Outlet, *, streams: bool, unwind_timeout_s: float) -> None:
        self.flight = flight
        self.released = asyncio.Event()
        """The engine holds nothing of it any more."""
        self._outlet = outlet
        self._streams = streams
        self._unwind_timeout_s = unwind_timeout_s
        self._splitter = EventSplitter()
        self._stamper = EventStamper()
        self._writing = asyncio.Lock()
        self._control: asyncio.TaskGroup | None = None
        self._over = asyncio.Event()  # handed over: what the handler still says is not for the client
        self._gone = asyncio.Event()  # told to the handler as a disconnect
        self._body_taken = False
        self._head = Head(500, ())
        self._is_events = False  # the handler answers with an event stream
        self._plain = bytearray()
        self._made: int | None = None  # the `created` of this run
        self._names: Names | None = None  # for parts of the answer that the API names
        self._started = False
        self._head_sent = False
        self._finished = False
        self._answer: bytes | None = None  # of an answer that is not an event stream

    @property
    def handed_over(self) -> bool:
        """The last word was said: what is left of it here only unwinds."""
        return self._over.is_set()

    async def serve(self, engine: Engine, scope: Scope) -> None:
        """Run the engine's handler on this flight's request to its end. On return the engine holds nothing of it any more."""
        async with asyncio.TaskGroup() as control:
            self._control = control
            try:
                async with engine.open_flight(self.flight):
                    if self._streams and self.flight.names_are_drawn:
                        self._names = Names(self.flight.leg.request, self.flight.http.body)
                    try:
                        await self._run(engine.openai_app, scope)
                    finally:
                        self.flight.end()
            finally:
                self._control = None
                self.released.set()

    async def finish(self) -> None:
        """End the answer, after `serve`: so when a client sees the end, nothing of its request is left here."""
        if self._answer is not None:
            await self._outlet.answer(self._head, self._answer)
        elif self._finished:
            await self._outlet.end()

    def say(self, event: bytes) -> None:
        """Write a control event as soon as the outlet takes it; order is kept. Never waits for a slow reader."""
        self._speak(event, last=False)

    def hand_over(self, event: bytes) -> None:
        """Say the last word: nothing of the handler's comes after it, and the answer ends there."""
        self._over.set()
        self._speak(event, last=True)

    def release(self, reason: str) -> None:
        """Let the request go, unfinished: its gateway resumes it at another instance."""
        self.hand_over(released_event(reason))

    def _speak(self, event: bytes, *, last: bool) -> None:
        if self._control is not None:
            self._control.create_task(self._write_control(event, last=last))

    async def _write_control(self, event: bytes, *, last: bool) -> None:
        async with self._writing:
            if self._finished:
                return
            await self._start(None)
            await self._outlet.write(event)
            self._finished = last

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        context = contextvars.copy_context()
        context.run(current_flight.set, self.flight)
        async with asyncio.TaskGroup() as tasks:
            handler = tasks.create_task(self._handle(app, scope), context=context)
            watchers = [tasks.create_task(self._outlet.wait_left()), tasks.create_task(self._over.wait())]
            progress = None if self._streams else tasks.create_task(self._report_progress())
            await asyncio.wait([handler, *watchers], return_when=asyncio.FIRST_COMPLETED)
            self._gone.set()
            if not handler.done():
                await asyncio.wait([handler], timeout=self._unwind_timeout_s)
            for task in (handler, progress, *watchers):
                if task is not None:
                    task.cancel()

    async def _handle(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if not self._gone.is_set():
                log.exception("the engine's handler failed for %s", self.flight.leg)
        if self._finished or self._gone.is_set() or self._over.is_set():
            return
        if not self._started:
            # An answer cut short, or none: whole and honest while nothing was sent. Later, the outlet is left without an end.
            self._head = Head(500, ((b"content-type", b"application/json"),))
            self._plain[:] = error_body("The engine's server failed.", "internal_error", "internal_error")
            await self._send_plain()

    async def _receive(self) -> Message:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self.flight.http.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.flight.failed and self._started and not self._finished:
            self._over.set()  # left without an end, so that the gateway goes on elsewhere
        if self._gone.is_set() or self._over.is_set() or self._finished:
            await asyncio.sleep(0)  # a handler with much to say must not keep others from running
            return
        if message["type"] == "http.response.start":
            # Held until there is a body: an answer that fails before its first byte can still become an error.
            self._head = Head(message["status"], tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ())))
            self._is_events = self._head.streams_events
        elif message["type"] == "http.response.body":
            body = bytes(message.get("body", b""))
            last = not message.get("more_body", False)
            if self._is_events:
                await self._send_events(body, last=last)
            else:
                self._plain += body
                if last:
                    await self._send_plain()

    async def _send_events(self, body: bytes, *, last: bool) -> None:
        events = [self._as_shown(event) for event in self._splitter.push(body)]
        async with self._writing:
            data = self._stamper.stamp(events, self._ids(self.flight.yielded)) if events else b""
            if last:
                data += self._splitter.flush()
            if self._over.is_set() or not (data or last):
                return
            await self._start(self._head)
            if data:
                await self._outlet.write(data)
            self._finished = last

    async def _send_plain(self) -> None:
        """An answer that is not an event stream: as it is, or as an event if events were promised or sent already."""
        head, body = self._head, self._with_shown_created(bytes(self._plain))
        async with self._writing:
            if self._over.is_set():
                return
            if self._started or (head.status == 200 and not self._streams):
                await self._write_progress()
                await self._start(None)
                await self._outlet.write(answer_event(head.status, head.headers, body))
                self._finished = True
            else:
                self._finished = True
                self._answer = body

    async def _report_progress(self) -> None:
        while True:
            await self.flight.wait_noted()
            async with self._writing:
                if not (self._over.is_set() or self._finished):
                    await self._write_progress()

    async def _write_progress(self) -> None:
        tokens = self._stamper.tokens
        ids = self._ids(len(self.flight.history))
        if ids and not self._streams:
            await self._start(None)
            self._stamper.tokens += len(ids)
            await self._outlet.write(progress_events(tokens, ids))

    def _ids(self, tokens: int) -> Sequence[int]:
        """Ids of the tokens after the last cursor, up to the first `tokens` ones."""
        return [step.token for step in self.flight.history[self._stamper.tokens : tokens]]

    def _as_shown(self, event: bytes) -> bytes:
        event = self._with_shown_created(event)
        return event if self._names is None else self._names.rename(event)

    def _with_shown_created(self, data: bytes) -> bytes:
        """The bytes with the `created` second that the client is, or will be, shown."""
        if self._made is None:
            self._made = find_created(data)
            if self._made is None:
                return data
            if self.flight.created is None:
                self.flight.created = self._made
        shown = self.flight.created
        return data if shown is None or shown == self._made else replace_created(data, self._made, shown)

    async def _start(self, head: Head | None) -> None:
        if not self._started or (head is not None and not self._head_sent):
            self._started = True
            self._head_sent = head is not None
            await self._outlet.start(head)
