"""The error tree of the gateway, and its two renderings: an OpenAI JSON answer before the first byte, an SSE event after it.

GatewayError
├── MalformedBody        400  not JSON, or not an object
├── MalformedOrder       400  an admin order that makes no sense
├── MalformedQuery       400  an admin question that makes no sense
├── MalformedCursor      400  a last-event-id that is none of ours
├── Unauthorized         401  /admin without its token
├── BadApiKey            401  no API key, or an unknown one
├── ModelNotAllowed      403  the API key is not for that model
├── TierNotAllowed       403  ... or not for that tier
├── AdminClosed          403  /admin without a token set, on an address others can reach
├── NotFound             404  no such route
│   ├── ModelNotFound    404  no instance serves the model
│   ├── RequestNotFound  404  no live request of that id
│   ├── StreamNotFound   404  no stream of that id can be gone on with
│   └── InstanceNotFound 404  no such passive backend
├── MethodNotAllowed     405
├── BodyTimeout          408  the client did not send its body in time
├── HeadTimeout          408  ... nor the head of its request
├── NoOtherInstance      409  nowhere to move to
├── StreamTaken          409  another connection reads that stream on
├── StreamUncertain      409  its client has seen more than is known of it
├── StreamDiverged       409  what was computed again is not what its client has seen
├── BodyTooLarge         413
├── HeadTooLarge         431
├── RateLimited          429  the API key has used up its requests or tokens
├── QueueFull            429  no place in line, or the place was given to a more urgent request
├── UpstreamFailed       502  an instance could not be used, or failed in mid-answer
│   ├── UpstreamUnreachable   no connection
│   ├── UpstreamBroken        the connection ended before the answer did
│   ├── UpstreamSilent        a deadline passed
│   ├── UpstreamDeclined      an order to it, or a question, was answered with an error
│   ├── UpstreamLetGo         it is alive, and has the request no longer
│   │   └── UpstreamPreempted     it has taken the request's memory away: it waits in line again
│   ├── UpstreamRefused       it answered with a 5xx, which is passed on if nobody else can help
│   ├── UpstreamUntrusted     it and this gateway do not share a secret
│   └── StreamGap             a moved stream does not go on where the first part ended
├── NoInstance           503  nobody to send the request to right now
├── TooManyStreams       503  as many requests are being served as may be
├── StoreUnavailable     503  an order that must be kept cannot be
├── PatienceOver         503  it has waited in line as long as its tier may
├── ShuttingDown         503  the gateway stops, and the request took longer than its grace
└── FirstByteTimeout     504  no answer within the deadline over all attempts

ClientLeft is no error: the client closed its connection (ClientTooSlow: it was closed, for the client did not read).
"""

import json
from collections.abc import Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]

REASON_HEADER = b"x-midstream-reason"
"""On every 429 and 503 of ours: why, in one word."""


class ClientLeft(Exception):
    """The client closed its connection; nobody is left to answer."""


class ClientTooSlow(ClientLeft):
    """The client did not read, and its connection was closed."""


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
            headers.append((REASON_HEADER, self.reason.encode()))
        return headers

    def events(self) -> bytes:
        """How the error ends a stream that has begun."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


class MalformedBody(GatewayError):
    """The body is not a JSON object."""

    status, type, code = 400, "invalid_request_error", "invalid_body"


class MalformedOrder(GatewayError):
    """An admin order with missing or unusable fields."""

    status, type, code = 400, "invalid_request_error", "invalid_order"


class MalformedQuery(GatewayError):
    """An admin question with unusable parameters."""

    status, type, code = 400, "invalid_request_error", "invalid_query"


class MalformedCursor(GatewayError):
    """A last-event-id that is no id of an event of ours."""

    status, type, code = 400, "invalid_request_error", "invalid_last_event_id"


class Unauthorized(GatewayError):
    """The admin token is missing or wrong."""

    status, type, code = 401, "authentication_error", "invalid_admin_token"


class BadApiKey(GatewayError):
    """No API key, or one that is not known."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotAllowed(GatewayError):
    """The API key is not for that model."""

    status, type, code = 403, "permission_error", "model_not_allowed"


class TierNotAllowed(GatewayError):
    """The API key is not for so high a tier."""

    status, type, code = 403, "permission_error", "tier_not_allowed"


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


class StreamNotFound(NotFound):
    """No stream of that id is kept, or not for this caller."""

    code = "stream_not_found"


class InstanceNotFound(NotFound):
    """No passive backend has that id."""

    code = "instance_not_found"


class MethodNotAllowed(GatewayError):
    """The route exists, the method does not."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class HeadTimeout(GatewayError):
    """The client did not send the head of its request in time."""

    status, type, code = 408, "invalid_request_error", "head_timeout"


class BodyTimeout(GatewayError):
    """The client did not send its body in time."""

    status, type, code = 408, "invalid_request_error", "body_timeout"


class NoOtherInstance(GatewayError):
    """A migration has no destination."""

    status, type, code = 409, "invalid_request_error", "no_other_instance"


class StreamTaken(GatewayError):
    """Another connection reads that stream on."""

    status, type, code = 409, "invalid_request_error", "stream_taken"


class StreamUncertain(GatewayError):
    """The client has seen tokens that nobody knows any more, and that would not come again the same."""

    status, type, code = 409, "invalid_request_error", "stream_uncertain"


class StreamDiverged(GatewayError):
    """What is known, or was computed again, is not what the client has seen."""

    status, type, code = 409, "invalid_request_error", "stream_diverged"


class BodyTooLarge(GatewayError):
    """The body is over the limit."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class RateLimited(GatewayError):
    """The API key has used up what it may use for now. `reason`: key_requests or key_tokens."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(self, message: str, *, reason: str, retry_after_s: int) -> None:
        super().__init__(message)
        self._reason = reason
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        return self._reason


class Refused(GatewayError):
    """There is too much to do. Says when it is worth trying again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    """As many as may wait do; or a more urgent request got the place."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class PatienceOver(Refused):
    """It has waited in line as long as its tier may."""

    status, type, code = 503, "service_unavailable", "patience_over"


class HeadTooLarge(GatewayError):
    """The head of the request is over the limit."""

    status, type, code = 431, "invalid_request_error", "head_too_large"


class UpstreamFailed(GatewayError):
    """An instance could not be used or failed in mid-answer."""

    status, code = 502, "instance_failed"


class UpstreamUnreachable(UpstreamFailed):
    """No connection to the instance."""

    code = "instance_unreachable"


class UpstreamBroken(UpstreamFailed):
    """The connection ended, or the answer made no sense, before the answer was complete."""

    code = "instance_lost"


class UpstreamLetGo(UpstreamFailed):
    """The instance is well, but has let the request go, or lost it."""

    code = "instance_lost"


class UpstreamPreempted(UpstreamLetGo):
    """The instance has taken the request's memory away, and has none for it: it is better off in line."""

    code = "preempted"


class UpstreamSilent(UpstreamFailed):
    """The instance said nothing within its deadline."""

    code = "instance_silent"


class UpstreamDeclined(UpstreamFailed):
    """The instance answered an order or a question with an error; `answered` is its status."""

    def __init__(self, answered: int, text: str) -> None:
        super().__init__(f"The instance answered with status {answered}: {text}")
        self.answered = answered


class UpstreamUntrusted(UpstreamFailed):
    """The instance turned this gateway away, or did not prove that it belongs to the fleet."""

    code = "instance_untrusted"


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


class TooManyStreams(GatewayError):
    """This gateway serves as many requests as it may."""

    status, type, code = 503, "service_unavailable", "too_many_streams"
    retry_after_s = 1


class StoreUnavailable(GatewayError):
    """The shared store does not answer, and the order is nothing without it."""

    status, type, code = 503, "service_unavailable", "store_unavailable"
    retry_after_s = 1


class ShuttingDown(GatewayError):
    """The gateway stops before the answer is complete."""

    status, type, code = 503, "service_unavailable", "shutting_down"
    retry_after_s = 1


class FirstByteTimeout(GatewayError):
    """No instance gave a first byte within the deadline."""

    status, type, code = 504, "timeout_error", "first_byte_timeout"


def first_error(group: BaseExceptionGroup[GatewayError]) -> GatewayError:
    """The first of several that came at once."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
