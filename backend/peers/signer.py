"""Signs what this process asks other members of its fleet, and checks that they answer. The clock and chance of backend.peers.signature."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from backend.peers.signature import PROOF_HEADER, REFUSAL_HEADER, SIGNATURE_HEADER, Question, Secrets, is_proof, sign

RawHeaders = Sequence[tuple[bytes, bytes]]


def wall_clock_ms() -> int:
    """Milliseconds since 1970, by this host's clock."""
    return int(datetime.now(UTC).timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class Signed:
    """A request on its way: the headers to send with it. Without a secret there are none, and nothing is asked of the answer."""

    headers: tuple[tuple[bytes, bytes], ...]
    nonce: str
    secrets: Secrets

    def objection(self, status: int, headers: RawHeaders) -> str | None:
        """Why the answer is not to be used; None if all is well."""
        found = {name.lower(): value.decode("latin-1") for name, value in headers}
        if REFUSAL_HEADER in found:
            return f"it turned the request away ({found[REFUSAL_HEADER][:40]}): do both have the same MIDSTREAM_FLEET_SECRET?"
        if self.secrets and not is_proof(self.secrets, self.nonce, status, found.get(PROOF_HEADER, "")):
            return "it did not prove that it belongs to the fleet: has it a MIDSTREAM_FLEET_SECRET?"
        return None


class Signer:
    """Signs with the first of the secrets; without one, not at all."""

    def __init__(self, fleet_secrets: Secrets, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._secrets = fleet_secrets
        self._clock_ms = clock_ms

    def sign(self, method: str, url: str, headers: RawHeaders, body: bytes) -> Signed:
        """Sign one sending of a request; a repeated one needs a new signature."""
        if not self._secrets:
            return Signed((), "", ())
        parts = urlsplit(url)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        nonce = secrets.token_hex(16)
        question = Question(method, parts.netloc, target, tuple(headers))
        signature = sign(self._secrets[0], question, body, time_ms=self._clock_ms(), nonce=nonce)
        return Signed(((SIGNATURE_HEADER, signature.text().encode()),), nonce, self._secrets)
