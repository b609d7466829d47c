"""PURE. The scheme by which members of a fleet sign requests to each other, and answers.

A request carries `x-midstream-signature: v1;TIME_MS;NONCE;BODY_SHA256;MAC`. The MAC (HMAC-SHA256 under the fleet's secret) covers the
method, the authority and target of the URL, the time, the nonce, the body's hash and every other `x-midstream-` header. So what was
overheard cannot be changed, nor sent to another member, nor be sent again: each member remembers the nonces of its time window.
The answer carries `x-midstream-proof`, a MAC over the request's nonce and the answer's status: its sender has the secret too.
"""

import hashlib
import hmac
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

SIGNATURE_HEADER = b"x-midstream-signature"
PROOF_HEADER = b"x-midstream-proof"
REFUSAL_HEADER = b"x-midstream-refusal"
"""On an answer with which a member turns another away: its value says why."""
MIN_SECRET_BYTES = 16

_OURS = b"x-midstream-"
_SIGNATURE = re.compile(r"v1;(\d{1,15});([0-9a-f]{32});([0-9a-f]{64});([0-9a-f]{64})")

Secrets: TypeAlias = Sequence[bytes]
"""The first signs; all are accepted, so that a secret can be changed while the fleet runs."""


@dataclass(frozen=True, slots=True)
class Question:
    """What of a request is signed, but for its body. `target` is path and query as they are on the wire."""

    method: str
    authority: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def text(self) -> str:
        """One line for each part. None of them can hold a line break."""
        ours = sorted((name.lower(), value) for name, value in self.headers if name.lower().startswith(_OURS))
        lines = [f"{name.decode('latin-1')}: {value.decode('latin-1')}" for name, value in ours if name != SIGNATURE_HEADER]
        return "\n".join((self.method, self.authority.lower(), self.target, *lines))


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature that was read, and not yet believed."""

    time_ms: int
    nonce: str
    body_sha256: str
    mac: str

    def text(self) -> str:
        return f"v1;{self.time_ms};{self.nonce};{self.body_sha256};{self.mac}"


class SignatureError(Exception):
    """A request is not from the fleet, or not from now; `code` is a snake_case word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_secrets(text: str) -> Secrets:
    """Secrets separated by commas. Raises ValueError for one that can be guessed."""
    secrets = tuple(part.strip().encode() for part in text.split(",") if part.strip())
    if any(len(secret) < MIN_SECRET_BYTES for secret in secrets):
        raise ValueError(f"a fleet secret has at least {MIN_SECRET_BYTES} bytes")
    return secrets


def sign(secret: bytes, question: Question, body: bytes, *, time_ms: int, nonce: str) -> Signature:
    """Sign a request. `nonce`: 32 hex digits, never used before."""
    unsigned = Signature(time_ms, nonce, hash_of(body), "")
    return Signature(time_ms, nonce, unsigned.body_sha256, _mac(secret, question, unsigned))


def read_signature(text: str) -> Signature:
    """The header's value. Raises SignatureError."""
    found = _SIGNATURE.fullmatch(text)
    if found is None:
        raise SignatureError("bad_signature", "The signature cannot be read.")
    return Signature(int(found[1]), found[2], found[3], found[4])


def verify(secrets: Secrets, question: Question, signature: Signature, *, now_ms: int, window_ms: int) -> bytes:
    """The secret it was signed with. The body's hash is still to be compared, and the nonce to be noted. Raises SignatureError."""
    matching = [secret for secret in secrets if hmac.compare_digest(_mac(secret, question, signature), signature.mac)]
    if not matching:
        raise SignatureError("bad_signature", "The request is not signed with a secret of this fleet, or not for this address.")
    if abs(now_ms - signature.time_ms) > window_ms:
        raise SignatureError("stale_signature", f"The signature's time is more than {window_ms / 1000:g} s away from the time here.")
    return matching[0]


def hash_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def prove(secret: bytes, nonce: str, status: int) -> str:
    """The proof, for the sender of the request of that nonce, that its answer comes from a member."""
    return hmac.new(secret, f"proof 1\n{nonce}\n{status}".encode(), hashlib.sha256).hexdigest()


def is_proof(secrets: Iterable[bytes], nonce: str, status: int, proof: str) -> bool:
    """Whether it is one, under any of the secrets."""
    return any(hmac.compare_digest(prove(secret, nonce, status).encode(), proof.encode()) for secret in secrets)


class Nonces:
    """Those seen within the last two windows (a clock may be a window ahead). Only what is signed is noted, so peers alone make it grow."""

    def __init__(self, window_ms: int) -> None:
        self._kept_ms = 2 * window_ms
        self._order: deque[tuple[int, str]] = deque()
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, nonce: str, now_ms: int) -> None:
        """Raises SignatureError if it was seen before."""
        while self._order and now_ms - self._order[0][0] > self._kept_ms:
            self._seen.discard(self._order.popleft()[1])
        if nonce in self._seen:
            raise SignatureError("replayed", "This request was received before.")
        self._seen.add(nonce)
        self._order.append((now_ms, nonce))


def _mac(secret: bytes, question: Question, signature: Signature) -> str:
    text = f"request 1\n{signature.time_ms}\n{signature.nonce}\n{signature.body_sha256}\n{question.text()}"
    return hmac.new(secret, text.encode("latin-1", "replace"), hashlib.sha256).hexdigest()
