"""A launcher's HTTP API, for gateways (gateway/scaling/http_launcher.py asks).

    GET    /health
    GET    /instances          {"instances": [{"instance", "model", "order", "age_s", "state", "stoppable", "detail"}]}
    PUT    /instances/KEY      {"model": NAME or null}  ->  {"instance": ID}
    DELETE /instances/ID       {}

`authorization: Bearer TOKEN` with each but the first, when there is a token; `x-midstream-fence` with each order.
Errors in OpenAI's shape: 401, 400 (`bad_order`), 409 (`fenced`), 502 (`launcher_failed`).
"""

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.scaling.http_launcher import FENCE_HEADER
from gateway.scaling.launcher import Launched, LauncherError
from migration.leg import InstanceId
from migration.typed_json import encode

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
Handler = Callable[[Request], Awaitable[JSONResponse]]


class Starter(Protocol):
    """A launcher behind the service: the port's methods without the fence, which is checked here."""

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId: ...

    async def stop(self, instance: InstanceId) -> None: ...

    async def list(self) -> Sequence[Launched]: ...


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = JSONResponse(
            {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "api_error", "param": None, "code": code}},
            status,
        )


class LauncherService:
    """One order at a time. `token` None: whoever can reach it may use it."""

    def __init__(self, starter: Starter, token: str | None) -> None:
        self._starter = starter
        self._token = token
        self._fence = 0
        self._ordering = asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI app."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/instances", self._guarded(self._list), methods=["GET"]),
                Route("/instances/{name}", self._guarded(self._launch), methods=["PUT"]),
                Route("/instances/{name}", self._guarded(self._stop), methods=["DELETE"]),
            ]
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> JSONResponse:
            try:
                self._check_token(request)
                async with self._ordering:
                    if request.method != "GET":
                        self._check_fence(request)
                    return await handler(request)
            except _Refused as refused:
                return refused.answer
            except LauncherError as error:
                return _Refused(502, "launcher_failed", str(error)).answer

        return handle

    def _check_token(self, request: Request) -> None:
        shown = request.headers.get("authorization", "")
        if self._token is not None and not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            raise _Refused(401, "invalid_token", "The launcher's token is missing or wrong.")

    def _check_fence(self, request: Request) -> None:
        text = request.headers.get(FENCE_HEADER, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise _Refused(400, "bad_order", f"An order needs the header {FENCE_HEADER}, a number.")
        if int(text) < self._fence:
            raise _Refused(409, "fenced", "Another gateway has taken over since.")
        self._fence = int(text)

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _list(self, request: Request) -> JSONResponse:
        return JSONResponse({"instances": [encode(each) for each in await self._starter.list()]})

    async def _launch(self, request: Request) -> JSONResponse:
        match await _read_json(request):
            case {"model": None | str() as model}:
                return JSONResponse({"instance": await self._starter.launch(_name(request), model or None)})
        raise _Refused(400, "bad_order", 'Expected {"model": NAME or null}.')

    async def _stop(self, request: Request) -> JSONResponse:
        await self._starter.stop(_name(request))
        return JSONResponse({})


def _name(request: Request) -> InstanceId:
    name = str(request.path_params["name"])
    if not _NAME.fullmatch(name):
        raise _Refused(400, "bad_order", "An instance's name is 1 to 64 of A-Za-z0-9._-")
    return InstanceId(name)


async def _read_json(request: Request) -> object:
    try:
        body: object = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise _Refused(400, "bad_order", "The body is not JSON.") from None
    return body
