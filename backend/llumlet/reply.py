"""Whole answers of the llumlet's own, in OpenAI's shape where they are errors."""

import json

from starlette.types import Receive, Scope, Send

from backend.llumlet.wire import error_body


class Reply(Exception):
    """One answer, JSON unless it says otherwise. May be raised where it ends the handling of a request."""

    def __init__(
        self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = (), *, content_type: str = "application/json"
    ) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = (("content-type", content_type), ("content-length", str(len(body))), *headers)

    @staticmethod
    def json(value: object, status: int = 200) -> "Reply":
        return Reply(status, json.dumps(value, separators=(",", ":")).encode())

    @staticmethod
    def error(status: int, message: str, *, code: str, headers: tuple[tuple[str, str], ...] = ()) -> "Reply":
        kind = "invalid_request_error" if status < 500 else "server_error"
        return Reply(status, error_body(message, kind, code), headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})
