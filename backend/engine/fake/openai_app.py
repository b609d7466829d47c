"""The fake engine's OpenAI server: its routes, and the frame that owns an answer from the first token to the last byte sent.

Every token goes through the same steps, known from before or fresh from the engine: detokenise, look for stop strings, count, tell.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from backend.engine.fake.anthropic_answer import Message
from backend.engine.fake.detokenizer import Detokenizer
from backend.engine.fake.generation import Output
from backend.engine.fake.openai_answer import AnswerHead, error
from backend.engine.fake.openai_request import (
    BadRequest,
    Body,
    ChatBody,
    CompletionBody,
    Job,
    MessagesBody,
    ResponsesBody,
    chat_job,
    completion_job,
    messages_job,
    responses_job,
)
from backend.engine.fake.responses_answer import ResponseTelling
from backend.engine.fake.sampling import Sampling
from backend.engine.fake.settings import FakeSettings
from backend.engine.fake.telling import Choice, Delta, Telling, encode
from backend.engine.flight import current_flight
from backend.registry.instance import LoadReport

RESPONSES = "/v1/responses"
MOVABLE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES})
VERSION = "fake 1"

B = TypeVar("B", bound=Body)


class ServedEngine(Protocol):
    """What the server asks of its engine."""

    @property
    def settings(self) -> FakeSettings: ...

    def generate(self, prompt: tuple[int, ...], sampling: Sampling) -> AsyncGenerator[Output, None]: ...

    def load(self) -> LoadReport: ...


class Answer(Response):
    """Generates and sends one answer. If the client leaves, generation stops at once."""

    def __init__(self, engine: ServedEngine, job: Job, telling: Telling) -> None:
        super().__init__()
        self._engine = engine
        self._job = job
        self._telling = telling
        self._choices = [Choice() for _ in range(len(job.prompts) * job.n)]
        self._started = False
        self._opened = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._stream(send) if self._job.stream else self._whole(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate_all(None)
        await _json(self._telling.whole(self._choices))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await self._send(send, *self._telling.early())
        await self._generate_all(send)
        await self._send(send, *self._telling.closing(self._choices))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _generate_all(self, send: Send | None) -> None:
        requests = [(prompt, i) for prompt in self._job.prompts for i in range(self._job.n)]
        if len(requests) == 1:
            await self._generate(0, requests[0][0], self._sampling(0), send)
            return
        async with asyncio.TaskGroup() as group:
            for index, (prompt, i) in enumerate(requests):
                group.create_task(self._generate(index, prompt, self._sampling(i), send))

    def _sampling(self, i: int) -> Sampling:
        sampling = self._job.sampling
        return replace(sampling, seed=sampling.seed + i if self._job.seeded else secrets.randbits(64))

    async def _generate(self, index: int, prompt: tuple[int, ...], sampling: Sampling, send: Send | None) -> None:
        """One choice, from its first token to its last. Pull-driven: the next token is taken when this one has been sent."""
        text = Detokenizer(self._job.stop)
        async with aclosing(self._engine.generate(prompt, sampling)) as outputs:
            async for output in outputs:
                stopped = text.push(output.step.token) if output.step is not None else None
                reason = "stop" if stopped is not None else output.finish_reason
                delta = Delta(index, text.take(ended=reason is not None), output.step, reason, stopped)
                self._choices[index].add(delta)
                if send is not None:
                    await self._tell(send, delta)
                if reason is not None:
                    return

    async def _tell(self, send: Send, delta: Delta) -> None:
        if not self._opened:
            self._opened = True
            await self._send(send, *self._telling.opening(len(self._choices)))
        await self._send(send, *self._telling.tell(delta, self._choices[delta.index]))

    async def _send(self, send: Send, *parts: bytes) -> None:
        if parts and not self._started:
            self._started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})


async def _until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work, and stop it when the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with asyncio.TaskGroup() as group:
        working, watching = group.create_task(work), group.create_task(watch())
        working.add_done_callback(lambda _: watching.cancel())
        watching.add_done_callback(lambda _: working.cancel())


def build_openai_app(engine: ServedEngine) -> FastAPI:
    """The server. It has no lifespan of its own: the engine must be running."""
    app = FastAPI(title="fake engine", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    model, max_tokens = engine.settings.model, engine.settings.max_model_tokens
    started = _now()

    async def models() -> Response:
        card = {"id": model, "object": "model", "created": started, "owned_by": "midstream", "root": model, "parent": None}
        return _json(encode({"object": "list", "data": [card | {"max_model_len": max_tokens}]}))

    async def health() -> Response:
        return Response()

    async def version() -> Response:
        return _json(encode({"version": VERSION}))

    async def metrics() -> Response:
        return Response(_metrics(engine.load(), model), media_type="text/plain; version=0.0.4")

    for path, generate in _generating(engine).items():
        app.add_api_route(path, generate, methods=["POST"])
    for path, handler in (("/v1/models", models), ("/health", health), ("/version", version), ("/metrics", metrics)):
        app.add_api_route(path, handler, methods=["GET"])
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _generating(engine: ServedEngine) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The handlers of the routes that generate, by path."""
    model, bounds = engine.settings.model, (engine.settings.max_model_tokens, engine.settings.eos_one_in)

    async def chat(request: Request) -> Response:
        job = chat_job(await _parse(request, ChatBody, model), *bounds)
        return Answer(engine, job, openai("chatcmpl-", request, job))

    async def completions(request: Request) -> Response:
        job = completion_job(await _parse(request, CompletionBody, model), *bounds)
        return Answer(engine, job, openai("cmpl-", request, job))

    async def messages(request: Request) -> Response:
        job = messages_job(await _parse(request, MessagesBody, model), *bounds)
        return Answer(engine, job, Message("chatcmpl-" + _name(request), model, prompt_tokens(job)))

    async def responses(request: Request) -> Response:
        job = responses_job(await _parse(request, ResponsesBody, model), *bounds)
        return Answer(engine, job, ResponseTelling(model, _now(), prompt_tokens(job), job))

    def openai(prefix: str, request: Request, job: Job) -> AnswerHead:
        flight = current_flight.get()
        if flight is not None:
            flight.unmovable = "n" if job.n > 1 else "prompts" if len(job.prompts) > 1 else flight.unmovable
        name = prefix + _name(request)
        return AnswerHead(name, _now(), model, job.chat, prompt_tokens(job), job.include_usage, job.continuous_usage)

    def prompt_tokens(job: Job) -> int:
        return sum(len(prompt) for prompt in job.prompts)

    return {"/v1/chat/completions": chat, "/v1/completions": completions, "/v1/messages": messages, RESPONSES: responses}


def _name(request: Request) -> str:
    return request.headers.get("x-request-id") or secrets.token_hex(16)


def _now() -> int:
    return int(datetime.now(UTC).timestamp())


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _parse(request: Request, kind: type[B], model: str) -> B:
    try:
        body = kind.model_validate_json(await request.body())
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}" if where else first["msg"], where or None) from invalid
    if body.model not in (None, "", model):
        raise HTTPException(404, f"The model `{body.model}` does not exist.")
    return body


async def _bad_request(_: Request, refused: Exception) -> Response:
    return _json(error(400, str(refused), param=refused.param if isinstance(refused, BadRequest) else None), 400)


async def _http_error(_: Request, failed: Exception) -> Response:
    status, detail = (failed.status_code, failed.detail) if isinstance(failed, HTTPException) else (500, str(failed))
    return _json(error(status, detail, param="model" if detail.startswith("The model") else None), status)


def _metrics(load: LoadReport, model: str) -> str:
    usage_share = 1 - load.free_tokens / load.capacity_tokens
    series = (
        ("num_requests_running", "gauge", "Requests in the batch.", load.running),
        ("num_requests_waiting", "gauge", "Requests in the queue.", load.waiting),
        ("kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 1 = all.", usage_share),
        ("num_preemptions_total", "counter", "Preemptions so far.", load.preemptions),
    )
    return "".join(
        f'# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\nvllm:{name}{{model_name="{model}"}} {float(value)}\n'
        for name, kind, text, value in series
    )
