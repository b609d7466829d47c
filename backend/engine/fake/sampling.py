"""PURE. Which token comes next: a function of all tokens so far, of all KV bytes read and, at a temperature, of a counted random state."""

import struct
from dataclasses import dataclass
from hashlib import blake2b

from backend.engine.fake.vocabulary import CHOICES, EOS, forced_after
from migration.messages import TokenStep

MAX_LOGPROBS = 20
_SAMPLED_FROM = 8
_STATE = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens. `logprobs`: alternatives to report with each token; None = no log-probabilities."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    eos_one_in: int = 0


class RandomState:
    """A seed and how often it was drawn from. Lives as long as its request, and travels with it."""

    __slots__ = ("_drawn", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed & (2**64 - 1)
        self._drawn = 0

    def draw(self) -> int:
        """The next 64 random bits."""
        self._drawn += 1
        return int.from_bytes(blake2b(_STATE.pack(self._seed, self._drawn), digest_size=8).digest(), "little")

    def skip(self, draws: int) -> None:
        """Be where that many draws lead."""
        self._drawn += draws

    def dump(self) -> bytes:
        """The state as it travels."""
        return _STATE.pack(self._seed, self._drawn)

    def restore(self, state: bytes) -> None:
        """Go on where dump() was called. Raises ValueError."""
        if len(state) != _STATE.size:
            raise ValueError("not a random state")
        self._seed, self._drawn = _STATE.unpack(state)


def finish_reason(sampling: Sampling, token: int, output_tokens: int) -> str | None:
    """Why the answer ends with this token, the last of so many; None if it does not."""
    if token == EOS and not sampling.ignore_eos:
        return "stop"
    return "length" if output_tokens >= sampling.max_tokens else None


def next_step(sampling: Sampling, random: RandomState, reading: bytes, last_token: int, output_tokens: int) -> TokenStep:
    """The token after `last_token`, where `reading` digests all tokens and all KV bytes so far, with its log-probabilities if wanted.

    Candidates are an arithmetic series in the vocabulary, start and stride from the digest, ever less likely.
    """
    digest = blake2b(reading, digest_size=32).digest()
    start = int.from_bytes(digest[:8], "little") % CHOICES
    stride = 1 + int.from_bytes(digest[8:16], "little") % (CHOICES - 1)
    chosen = random.draw() % _SAMPLED_FROM if sampling.temperature > 0 else 0
    candidates = [1 + (start + at * stride) % CHOICES for at in range(MAX_LOGPROBS)]
    forced = forced_after(last_token)
    may_end = output_tokens >= sampling.min_tokens and not sampling.ignore_eos and sampling.eos_one_in
    if forced is not None:
        candidates[chosen] = forced
    elif may_end and int.from_bytes(digest[16:24], "little") % sampling.eos_one_in == 0:
        candidates[chosen] = EOS
    token = candidates[chosen]
    if sampling.logprobs is None:
        return TokenStep(token)
    values = [-(0.0625 + at * 0.5 + digest[24 + at % 8] / 1024) for at in range(MAX_LOGPROBS)]
    top = sampling.logprobs
    return TokenStep(token, ((token, *candidates[:top]), (values[chosen], *values[:top]), chosen + 1))
