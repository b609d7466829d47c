"""What is read of an incoming HTTP request before anyone handles it."""

import json

from starlette.types import Receive, Scope

from backend.engine.flight import USUAL_RANK
from backend.llumlet.reply import Reply
from migration.leg import Leg, RequestId
from migration.messages import HttpRequest

REQUEST_HEADER = b"x-midstream-request"
EPOCH_HEADER = b"x-midstream-epoch"
TIER_HEADER = b"x-midstream-tier"
RANK_HEADER = b"x-midstream-rank"
_TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})


class ClientLeft(Exception):
    """The client went away before its request was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that (lower case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. Raises ClientLeft, or a 413 Reply."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit_bytes:
            raise Reply.error(
                413, f"The request's body is over {limit_bytes} bytes.", code="body_too_large", headers=(("connection", "close"),)
            )
    return bytes(body)


def read_leg(scope: Scope) -> Leg:
    """The leg that the gateway names. Raises a 400 Reply."""
    return leg_of(header(scope, REQUEST_HEADER) or "", header(scope, EPOCH_HEADER) or "0")


def leg_of(request: str, epoch: str) -> Leg:
    """A leg from its two parts as text. Raises a 400 Reply."""
    if not request or not epoch.isdecimal() or len(epoch) > 9:
        raise Reply.error(400, "A request id and an epoch (0, 1, ...) are needed.", code="bad_leg")
    return Leg(RequestId(request), int(epoch))


def original(scope: Scope, body: bytes) -> HttpRequest:
    """The request as it can be handled again elsewhere; `path` includes the query."""
    query = scope.get("query_string", b"").decode("latin-1")
    path = f"{scope['path']}?{query}" if query else str(scope["path"])
    headers = tuple((bytes(name).decode("latin-1").lower(), bytes(value).decode("latin-1")) for name, value in scope["headers"])
    return HttpRequest(path=path, headers=headers, body=body)


def scope_of(http: HttpRequest) -> Scope:
    """The ASGI scope in which a request that came from elsewhere is handled again."""
    path, _, query = http.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 0),
        "scheme": "http",
        "method": "POST",
        "root_path": "",
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in http.headers],
        "state": {},
    }


def rank_of(http: HttpRequest) -> int:
    """Its place in an engine's queue, lower first, as the gateway wrote it in the headers, which go with a request wherever it moves."""
    asked = next((value for name, value in http.headers if name == RANK_HEADER.decode()), "")
    return int(asked) if asked.isascii() and asked.isdecimal() and len(asked) <= 4 else USUAL_RANK


def asks_for_stream(body: bytes) -> bool:
    """Whether the body asks for an event stream, judged as leniently as the engine's own parser; a malformed body does not."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    value = fields.get("stream") if isinstance(fields, dict) else None
    return value.lower() in _TRUE_WORDS if isinstance(value, str) else value == 1
