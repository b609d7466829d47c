"""PURE. How an error ends a stream that has begun, in the words of the API that the stream speaks."""

import json

from gateway.errors import GatewayError


def closing_events(path: str, error: GatewayError) -> bytes:
    """The last events of a stream on that route. Anthropic's and the responses API have an event of their own for it, and no end mark."""
    if path == "/v1/messages":
        told: dict[str, object] = {"type": "error", "error": {"type": "api_error", "message": error.message}}
    elif path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    else:
        return error.events()
    return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
