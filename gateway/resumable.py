"""PURE. A stream that its client may go on reading at another gateway: which may, what is kept, what the client has seen.

Each event of such a stream has a line `id: TOKENS.SUB;DIGEST`: the cursor of docs/wire.md, and a CRC-32 of all token ids so far, in hex.
A client that comes back sends the last one as `Last-Event-ID`. So it is known what it has seen even where less was kept, and noticed if
that turns out differently when it is computed again.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.asked import Asked
from gateway.errors import MalformedCursor, RawHeaders
from gateway.openai import BodyFields, read_body
from gateway.policy.tier import Tiers
from gateway.stream_ends import MESSAGES

EPOCHS_OF_A_TERM = 1_000_000
"""Each owner of a stream has epochs of its own, far more than one can use up: so none need be told another's."""

_SECRETS = frozenset({b"authorization", b"proxy-authorization", b"cookie", b"x-api-key", b"api-key"})
_CURSOR = re.compile(r"(\d{1,12})\.(\d{1,12});([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class Seen:
    """The last event that a client has seen, and the digest of the token ids up to there."""

    tokens: int = 0
    sub: int = -1
    digest: int = 0

    @property
    def anything(self) -> bool:
        return self.sub >= 0


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """`key`: the name of the API key it came with. Secrets are not in its headers."""

    key: str | None
    tier: str
    target: str
    headers: RawHeaders
    body: bytes

    @property
    def is_repeatable(self) -> bool:
        """Whether the same request is answered by the same tokens: greedy, or with a seed."""
        try:
            raw = json.loads(self.body)
        except RecursionError:  # engines may read deeper than we do
            return False
        seed, temperature = raw.get("seed"), raw.get("temperature")
        has_seed = isinstance(seed, int) and not isinstance(seed, bool) and self.target.partition("?")[0] != MESSAGES  # which knows none
        return has_seed or (isinstance(temperature, int | float) and temperature == 0)

    def asked(self, again: RawHeaders, tiers: Tiers) -> Asked:
        """The request as it was, with the secrets of the headers with which it is gone on with."""
        secrets = tuple((name, value) for name, value in again if name in _SECRETS)
        return Asked((*self.headers, *secrets), self.target, self.body, read_body(self.body), tiers.find(self.tier), None)


def wants_to_resume(headers: RawHeaders) -> bool:
    """Whether the client may come back."""
    return any(name == b"x-midstream-resumable" and value.strip() == b"1" for name, value in headers)


def why_not_kept(fields: BodyFields, body_bytes: int, max_body_bytes: int) -> str | None:
    """Why its client cannot come back, as a snake_case word; None if it can."""
    if not fields.stream:
        return "no_stream"
    if fields.n != 1:
        return "n"
    if fields.prompts > 1:
        return "prompts"
    if fields.logprobs_at_end:
        return "logprobs"
    return "body_too_large" if body_bytes > max_body_bytes else None


def digest_of(ids: Iterable[int], before: int = 0) -> int:
    """Of those token ids, after others with the digest `before`."""
    return zlib.crc32(b"".join(b"%d," % token for token in ids), before)


def id_line(seen: Seen) -> bytes:
    """The first line of an event: what a client has seen with it."""
    return b"id: %d.%d;%08x\n" % (seen.tokens, seen.sub, seen.digest)


def read_seen(last_event_id: str | None) -> Seen:
    """What a client says it has seen; without a word: nothing. Raises MalformedCursor."""
    if not last_event_id:
        return Seen()
    match = _CURSOR.fullmatch(last_event_id.strip())
    if match is None:
        raise MalformedCursor("The header last-event-id is no id of an event of this stream.")
    return Seen(int(match[1]), int(match[2]), int(match[3], 16))


def to_document(asked: Asked, key: str | None) -> str:
    """What is kept of a request, as JSON."""
    headers = [
        [name.decode("latin-1"), value.decode("latin-1")]
        for name, value in asked.headers
        if name not in _SECRETS and not name.startswith(b"x-midstream-")
    ]
    body = base64.b64encode(asked.body).decode()
    return json.dumps({"key": key, "tier": asked.tier.name, "target": asked.target, "headers": headers, "body": body})


def from_document(text: str) -> KeptRequest:
    """The reverse. Raises ValueError, KeyError, TypeError for what is none."""
    raw = json.loads(text)
    headers = tuple((str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in raw["headers"])
    key = raw["key"]
    return KeptRequest(
        None if key is None else str(key), str(raw["tier"]), str(raw["target"]), headers, base64.b64decode(raw["body"], validate=True)
    )
