"""Every other route of an engine's OpenAI server: the request goes to an instance as it came, and the answer comes back as it is.

Nothing here can be moved or resumed. What fails before the first byte is retried elsewhere, as on the streaming path (relay.py); the claim,
the deadlines and the client's leaving are handled alike. A route that names a stored response goes to the instance that holds it.
"""

import asyncio
from traceback import clear_frames

from starlette.types import Scope

from gateway.access.caller import Caller
from gateway.composition import Composition
from gateway.downstream import Downstream
from gateway.errors import (
    ClientLeft,
    FirstByteTimeout,
    GatewayError,
    NoInstance,
    UpstreamBroken,
    UpstreamFailed,
    UpstreamRefused,
    UpstreamSilent,
    UpstreamUnreachable,
    first_error,
)
from gateway.headers import find_header, passed_headers
from gateway.passed_body import PassedBody, read_passed
from gateway.policy.view import InstanceView
from gateway.priority import choose_tier_of_headers
from gateway.sse import Decoder, EventTooLong
from gateway.stored import remember_response
from gateway.tasks import Tasks
from gateway.upstream import UpstreamResponse
from migration.leg import InstanceId

POST_PATHS = (
    *("/v1/responses/{response}/cancel", "/v1/messages/count_tokens", "/v1/chat/completions/batch"),
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/tokenize", "/detokenize", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/systemone", "/generative_scoring"),
    *("/inference/v1/generate", "/cohere/v2/chat", "/v1/chat/completions/render", "/v1/completions/render"),
)
GET_PATHS = ("/v1/responses/{response}", "/tokenizer_info")
"""What vLLM serves to its users. What it serves to its operators (/sleep, /load, /metrics ...) is reached at the instance."""


class Passage:
    """One request, from its first byte to its last."""

    def __init__(self, parts: Composition, scope: Scope, client: Downstream, caller: Caller) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._client = client
        self._caller = caller
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        self._response_id: str | None = scope.get("path_params", {}).get("response")
        query = scope["query_string"]
        raw_path = scope.get("raw_path") or self._path.encode()
        self._target = raw_path.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        self._raw_headers = tuple(scope["headers"])
        self._arrived_s = parts.clock()
        self._tried: set[InstanceId] = set()
        self._failure: UpstreamFailed | None = None
        self._response: UpstreamResponse | None = None
        self._reading_since_s: float | None = None
        choice = choose_tier_of_headers(self._raw_headers, parts.policy.tiers)
        self.tier, self._tier_note = choice.tier.name, choice.note
        self.outcome = "failed"

    @property
    def used_tokens(self) -> int:
        """An estimate of what was asked, once it was answered; what an answer holds is not looked at."""
        return self._body.prompt_tokens if self.outcome == "ok" else 0

    def end(self) -> None:
        """Nothing: the request log is about requests whose tokens are counted."""

    async def serve(self) -> None:
        """Serve the request to its end. Errors are shown to the client; only a client that left is no error."""
        settings = self._settings
        try:
            declared = find_header(self._raw_headers, b"content-length")
            whole = await self._client.read_body(declared, settings.max_body_bytes, settings.body_timeout_s)
            self._body: PassedBody = read_passed(whole, find_header(self._raw_headers, b"content-type"), settings.aliases)
            await self._caller.admit(self._body.asked_model, self.tier, self._body.prompt_tokens)
            self._request = self._parts.request_ids.issue(find_header(self._raw_headers, b"x-request-id"))
            self._client.ours += [(b"x-request-id", self._request.encode()), (b"x-midstream-tier", self.tier.encode())]
            if self._tier_note is not None:
                self._client.ours.append((b"x-midstream-tier-note", self._tier_note.encode()))
            place = self._parts.ledger.place(self._request, self.tier, self._body.prompt_tokens)
            async with place as self._place, Tasks() as tasks:
                attendant = tasks.create_task(self._attend())
                try:
                    await self._run()
                except GatewayError as error:
                    await self._fail(error)
                finally:
                    attendant.cancel()
        except* ClientLeft:
            self.outcome = "client_left"
        except* GatewayError as group:
            await self._fail(first_error(group))
        finally:
            self._failure = None  # its traceback knows this passage

    async def _fail(self, error: GatewayError) -> None:
        self.outcome = error.reason
        clear_frames(error.__traceback__)  # they know the error, as it knows them
        if self._client.started:
            self._parts.metrics.broken_streams.labels(error.reason).inc()
        await self._client.fail(error)

    async def _attend(self) -> None:
        """Sees the client leave, keeps an idle stream open, and cuts off an instance that fell silent."""
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
        limit_s = self._settings.first_byte_timeout_s if self._body.stream else self._settings.answer_timeout_s
        try:
            async with asyncio.timeout(limit_s) as self._deadline:
                while True:
                    instance = await self._choose()
                    try:
                        if await self._ride(instance):
                            return
                    except UpstreamFailed as failure:
                        self._consider(instance.id, failure)
        except TimeoutError:
            raise FirstByteTimeout(f"No instance gave a first byte within {limit_s:g} s.") from None

    async def _choose(self) -> InstanceView:
        """The instance that holds what the request speaks of, if one is known to; else as for any request."""
        bound = self._response_id or self._body.previous_response
        excluded = frozenset(self._tried)
        if bound is not None and not self._tried:
            holder = await self._parts.ledger.holder_of(bound)
            known = [view.id for view in (await self._parts.ledger.view(self._settings.view_max_age_s)).instances]
            if holder in known:
                excluded = frozenset(known) - {holder}
        try:
            return await self._parts.dispatcher.choose(self._place, self._body.model, excluded)
        except NoInstance:
            if self._failure is None:
                raise
            raise self._failure from None

    def _consider(self, instance: InstanceId, failure: UpstreamFailed) -> None:
        """Go on elsewhere (return), or show what happened (raise)."""
        self._tried.add(instance)
        self._failure = failure
        if isinstance(failure, UpstreamUnreachable):
            self._parts.dispatcher.suspect(instance)
        if self._client.started or len(self._tried) >= self._settings.max_attempts:
            raise failure
        self._parts.metrics.retries.labels(failure.reason).inc()

    async def _ride(self, instance: InstanceView) -> bool:
        """This instance's answer; False if it does not hold what was asked for and another one may. Raises UpstreamFailed."""
        headers = passed_headers(self._raw_headers, self._request)
        patience_s = self._settings.attempt_timeout_s if self._body.stream else None
        try:
            async with asyncio.timeout(patience_s) as patience:
                opened = await self._parts.upstream.send(
                    self._method, instance.report.url, self._target, headers, self._body.raw, member=instance.is_member
                )
                async with opened as response:
                    if response.is_event_stream:
                        await self._pass_stream(instance, response, patience)
                        return True
                    return await self._pass_whole(instance, response)
        except TimeoutError:
            raise UpstreamSilent("The instance gave no first event in time.") from None

    async def _pass_whole(self, instance: InstanceView, response: UpstreamResponse) -> bool:
        body = await response.read_all(self._settings.max_answer_bytes)
        if response.status >= 500:
            raise UpstreamRefused(response.status, response.headers, body)
        if response.status == 404 and self._response_id is not None and await self._others(instance):
            self._tried.add(instance.id)
            return False
        if response.status == 200:
            await remember_response(self._parts, self._path, body, instance.id)
        self._begin(instance)
        self.outcome = "ok" if response.status < 400 else "request_refused"
        await self._client.answer(response.status, response.headers, body)
        return True

    async def _others(self, instance: InstanceView) -> bool:
        """Whether some other instance might hold it."""
        cluster = await self._parts.ledger.view(self._settings.view_max_age_s)
        return any(view.id not in self._tried and view.id != instance.id for view in cluster.instances)

    async def _pass_stream(self, instance: InstanceView, response: UpstreamResponse, patience: asyncio.Timeout) -> None:
        """Whole events, as they came; one write for each read."""
        decoder = Decoder(self._settings.max_answer_bytes, strips_cursors=False)
        try:
            while chunk := await self._read(response):
                if not (events := decoder.feed(chunk)):
                    continue
                shown = b"".join([event.raw for event in events])
                if not self._client.started:
                    patience.reschedule(None)
                    await remember_response(self._parts, self._path, shown, instance.id)
                    self._begin(instance)
                    await self._client.start(response.status, response.headers)
                await self._client.write(shown)
        except EventTooLong as error:
            raise UpstreamBroken(f"The instance sent {error}.") from error
        if not self._client.started:
            raise UpstreamBroken("The instance ended the stream before its first event.")
        self.outcome = "ok"
        await self._client.finish(decoder.rest())

    async def _read(self, response: UpstreamResponse) -> bytes:
        self._response = response
        self._reading_since_s = self._parts.clock()
        try:
            return await response.read()
        finally:
            self._response = self._reading_since_s = None

    # ------------------------------------------------------------------ before the first byte

    def _begin(self, instance: InstanceView) -> None:
        """The client is about to see its first byte: no more attempts, no more deadline over them."""
        self._deadline.reschedule(None)
        self._client.ours.append((b"x-midstream-instance", instance.id.encode()))
        self._parts.metrics.first_byte_s.labels(self.tier).observe(self._parts.clock() - self._arrived_s)
