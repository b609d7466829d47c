"""PURE. How answers end, in the words of the API that they speak: which event is a stream's last, and what an error of ours looks like."""

import json

from gateway.errors import GatewayError, UpstreamRefused

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

_LAST_EVENTS = {
    MESSAGES: frozenset({b"message_stop", b"error"}),
    RESPONSES: frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"error"}),
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names of errors, by status."""


def last_events(path: str) -> frozenset[bytes]:
    """The types of event that end a stream of that API; none: the end mark does, `data: [DONE]`."""
    return _LAST_EVENTS.get(path, frozenset())


def closing_events(path: str, error: GatewayError) -> bytes:
    """The last events of a stream on that route. Anthropic's and the responses API have an event of their own for it, and no end mark."""
    if path == MESSAGES:
        return b"event: error\ndata: " + _anthropic(error) + b"\n\n"
    if path == RESPONSES:
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return error.events()


def whole_error(path: str, error: GatewayError) -> bytes:
    """The body of an answer that is an error and nothing else. An engine's own is as the engine told it."""
    return _anthropic(error) if path == MESSAGES and not isinstance(error, UpstreamRefused) else error.body()


def _anthropic(error: GatewayError) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return json.dumps({"type": "error", "error": told}).encode()
