"""PURE. Which HTTP headers go on, in both directions, and which are ours."""

from gateway.errors import RawHeaders

_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id", b"priority"}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id"}
_OURS = b"x-midstream-"


def request_headers(client: RawHeaders, request: str, tier: str, rank: int, epoch: int = 0) -> RawHeaders:
    """The headers of a request to an instance: the client's, and ours in front. `rank` orders its queue, lower first.

    Nothing may be compressed: we read the stream."""
    name = request.encode()
    ours = (
        (b"x-request-id", name),
        (b"x-midstream-request", name),
        (b"x-midstream-epoch", str(epoch).encode()),
        (b"x-midstream-tier", tier.encode()),
        (b"x-midstream-rank", str(rank).encode()),
        (b"accept-encoding", b"identity"),
    )
    return ours + _filtered(client, _NOT_UPSTREAM)


def passed_headers(client: RawHeaders, request: str) -> RawHeaders:
    """The headers of a request that no llumlet need know of."""
    return ((b"x-request-id", request.encode()), (b"accept-encoding", b"identity"), *_filtered(client, _NOT_UPSTREAM))


def answer_headers(upstream: RawHeaders, ours: RawHeaders) -> RawHeaders:
    """The headers of an answer to the client. The length is set anew where it is known."""
    return _filtered(upstream, _NOT_DOWNSTREAM) + tuple(ours)


def find_header(headers: RawHeaders, name: bytes) -> str | None:
    """The first header of that (lower case) name, as text."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


def _filtered(headers: RawHeaders, dropped: frozenset[bytes]) -> tuple[tuple[bytes, bytes], ...]:
    named_by_connection = {word.strip().lower() for key, value in headers if key.lower() == b"connection" for word in value.split(b",")}
    return tuple(
        (key.lower(), value)
        for key, value in headers
        if key.lower() not in dropped and key.lower() not in named_by_connection and not key.lower().startswith(_OURS)
    )
