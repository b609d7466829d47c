"""PURE. What the API process says to the scheduler in the engine-core process, and what it hears back.

Orders travel as vLLM's own ADD requests, in `sampling_params.extra_args["midstream"]`: the one official way to a scheduler, which
also wakes an idle engine. Replies and news come back over a socket of ours, at once, without waiting for a step.
"""

from typing import Any

import msgspec

EXTRA_ARG = "midstream"
"""The key of `SamplingParams.extra_args` under which marks and orders travel."""


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    """On every request that came through a llumlet: its tier, and whether it arrives as a shell (known, not yet running)."""

    tier: str
    shell: bool = False


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first order: where to send replies."""

    order: int
    address: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Where does this request stand? Answered Standing."""

    order: int
    request: str


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    """Take it out of the batch and drain it. Answered Standing, with the output tokens."""

    order: int
    request: str


class Thaw(msgspec.Struct, frozen=True, tag="thaw"):
    """Put a frozen request back. Answered Done."""

    order: int
    request: str


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Hold memory for `room_tokens` for a shell whose output so far is `output`. Answered Held."""

    order: int
    request: str
    output: list[int]
    room_tokens: int


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    """Run a shell: its whole output is `output`; the KV of `computed_tokens` tokens is in place. Answered Done."""

    order: int
    request: str
    output: list[int]
    computed_tokens: int


Order = Hello | Look | Freeze | Thaw | Hold | Activate


class Done(msgspec.Struct, frozen=True, tag="done"):
    order: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`reason`: 'ended', 'prefill', 'no_memory', 'not_covered' or 'grammar'."""

    order: int
    reason: str


class Standing(msgspec.Struct, frozen=True, tag="standing"):
    """A look at a request. `blocks` are the engine's block ids in order; `output` is filled by Freeze only."""

    order: int
    phase: str
    prompt_tokens: int
    output_tokens: int
    settled_tokens: int
    preemptions: int
    blocks: list[int]
    output: list[int]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Memory held: the shell's block ids, and how many of its tokens the prefix cache held already."""

    order: int
    cached_tokens: int
    blocks: list[int]


class ShellHeld(msgspec.Struct, frozen=True, tag="shell"):
    """News: the scheduler holds this request as a shell."""

    request: str


class TierCount(msgspec.Struct, frozen=True):
    tier: str
    running: int
    tokens: int


class Cost(msgspec.Struct, frozen=True):
    """What steps cost, as far as measured; the fields of backend.registry.instance.StepCost."""

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_request_s: float = 0.0
    last_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_per_token2_s: float = 0.0


class Load(msgspec.Struct, frozen=True, tag="load"):
    """News: the load changed. In tokens; waiting demands in whole blocks."""

    urgent: bool
    capacity_tokens: int
    free_tokens: int
    block_tokens: int
    running: int
    waiting: int
    waiting_tokens: int
    head_tokens: int
    head_tier: str
    oldest_waiting_s: float
    tiers: list[TierCount]
    preemptions: int
    cost: Cost


Reply = Done | Failed | Standing | Held
News = ShellHeld | Load

_decoder: msgspec.msgpack.Decoder[Reply | News] = msgspec.msgpack.Decoder(Reply | News)
_encoder = msgspec.msgpack.Encoder()


def to_extra(value: Order | Mark) -> Any:
    """Plain built-in values, fit for SamplingParams.extra_args."""
    return msgspec.to_builtins(value)


def from_extra(value: Any) -> Order | Mark:
    """The inverse of to_extra. Raises msgspec.ValidationError."""
    return msgspec.convert(value, Order | Mark)


def encode(message: Reply | News) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Reply | News:
    """Raises msgspec.ValidationError, msgspec.DecodeError."""
    return _decoder.decode(data)
