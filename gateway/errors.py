"""The error tree of the gateway, and its two renderings: an OpenAI JSON answer before the first byte, an SSE event after it.

GatewayError
├── MalformedBody        400  not JSON, or not an object
├── MalformedOrder       400  an admin order that makes no sense
├── Unauthorized         401  /admin without its token
├── AdminClosed          403  /admin without a token set, on an address others can reach
├── NotFound             404  no such route
│   ├── ModelNotFound    404  no instance serves the model
│   └── RequestNotFound  404  no live request of that id
├── MethodNotAllowed     405
├── BodyTimeout          408  the client did not send its body in time
├── NoOtherInstance      409  nowhere to move to
├── BodyTooLarge         413
├── QueueFull            429  no place in line, or the place was given to a more urgent request
├── UpstreamFailed       502  an instance could not be used, or failed in mid-answer
│   ├── UpstreamUnreachable   no connection
│   ├── UpstreamBroken        the connection ended before the answer did
│   ├── UpstreamSilent        a deadline passed
│   ├── UpstreamRefused       it answered with a 5xx, which is passed on if nobody else can help
│   └── StreamGap             a moved stream does not go on where the first part ended
├── NoInstance           503  nobody to send the request to right now
├── PatienceOver         503  it has waited in line as long as its tier may
├── ShuttingDown         503  the gateway stops, and the request took longer than its grace
└── FirstByteTimeout     504  no answer within the deadline over all attempts

ClientLeft is no error: the client closed its connection.
"""

import json
from collections.abc import Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]


class ClientLeft(Exception):
    """The client closed its connection; nobody is left to answer."""


class GatewayError(Exception):
    """Base. Knows its HTTP status and its OpenAI `type` and `code`; `reason` is a snake_case word fit for a metric label."""

    status = 500
    type = "api_error"
    code = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str = "The gateway failed.", *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def reason(self) -> str:
        return self.code

    def body(self) -> bytes:
        """The error in OpenAI's shape, on one line."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self) -> RawHeaders:
        """The headers of the JSON answer."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return headers

    @property
    def ours(self) -> RawHeaders:
        """Headers of the answer that begin with `x-midstream-`."""
        return ()

    def events(self) -> bytes:
        """How the error ends a stream that has begun."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


class MalformedBody(GatewayError):
    """The body is not a JSON object."""

    status, type, code = 400, "invalid_request_error", "invalid_body"


class MalformedOrder(GatewayError):
    """An admin order with missing or unusable fields."""

    status, type, code = 400, "invalid_request_error", "invalid_order"


class Unauthorized(GatewayError):
    """The admin token is missing or wrong."""

    status, type, code = 401, "authentication_error", "invalid_admin_token"


class AdminClosed(GatewayError):
    """No admin token is set and the gateway can be reached from elsewhere."""

    status, type, code = 403, "permission_error", "admin_closed"


class NotFound(GatewayError):
    """Nothing is served there."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """No instance serves that model."""

    code = "model_not_found"


class RequestNotFound(NotFound):
    """No instance runs that request."""

    code = "request_not_found"


class MethodNotAllowed(GatewayError):
    """The route exists, the method does not."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTimeout(GatewayError):
    """The client did not send its body in time."""

    status, type, code = 408, "invalid_request_error", "body_timeout"


class NoOtherInstance(GatewayError):
    """A migration has no destination."""

    status, type, code = 409, "invalid_request_error", "no_other_instance"


class BodyTooLarge(GatewayError):
    """The body is over the limit."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class Refused(GatewayError):
    """There is too much to do. Says in a header why, and when it is worth trying again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def ours(self) -> RawHeaders:
        return ((b"x-midstream-reason", self.code.encode()),)


class QueueFull(Refused):
    """As many as may wait do; or a more urgent request got the place."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class PatienceOver(Refused):
    """It has waited in line as long as its tier may."""

    status, type, code = 503, "service_unavailable", "patience_over"


class UpstreamFailed(GatewayError):
    """An instance could not be used or failed in mid-answer."""

    status, code = 502, "instance_failed"


class UpstreamUnreachable(UpstreamFailed):
    """No connection to the instance."""

    code = "instance_unreachable"


class UpstreamBroken(UpstreamFailed):
    """The connection ended, or the answer made no sense, before the answer was complete."""

    code = "instance_lost"


class UpstreamSilent(UpstreamFailed):
    """The instance said nothing within its deadline."""

    code = "instance_silent"


class StreamGap(UpstreamFailed):
    """A moved stream does not go on where the part already shown ended."""

    code = "stream_gap"


class UpstreamRefused(UpstreamFailed):
    """The instance answered with a 5xx. Shown as it was if no other instance can help."""

    code = "instance_refused"

    def __init__(self, status: int, headers: RawHeaders, body: bytes) -> None:
        super().__init__(f"The instance answered with status {status}.")
        self.status = status
        self._headers = headers
        self._body = body

    def body(self) -> bytes:
        return self._body

    def headers(self) -> RawHeaders:
        return self._headers


class NoInstance(GatewayError):
    """No instance can take the request right now."""

    status, type, code = 503, "service_unavailable", "no_instance"
    retry_after_s = 1


class ShuttingDown(GatewayError):
    """The gateway stops before the answer is complete."""

    status, type, code = 503, "service_unavailable", "shutting_down"
    retry_after_s = 1


class FirstByteTimeout(GatewayError):
    """No instance gave a first byte within the deadline."""

    status, type, code = 504, "timeout_error", "first_byte_timeout"
