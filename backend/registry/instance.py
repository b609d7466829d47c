"""PURE. How an instance is known to the world: its load report and the claims on it. The wire contract, versioned, to and from JSON."""

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from pydantic import ConfigDict, TypeAdapter

from migration.leg import InstanceId
from migration.typed_json import decode, encode

REPORT_VERSION = 1
_STRICT = ConfigDict(strict=True, extra="forbid")


class InstanceKind(StrEnum):
    """What stands in front of the engine."""

    LLUMLET = "llumlet"
    """A Midstream backend: it reports itself, and its requests can move."""
    PASSIVE = "passive"
    """A plain OpenAI server, watched from outside by a gateway: its requests never move, and its answers carry no cursors."""


class InstanceState(StrEnum):
    """What an instance says of itself. (`stale` and `gone` are judged by the reader, from the report's age.)"""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Running requests of one tier: how many, and the context tokens they hold."""

    __pydantic_config__ = _STRICT

    running: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """The engine's own measurements. One decode step takes about base_s + per_token_s * context tokens + per_request_s * batch.

    A step with n prompt tokens takes prefill_base_s (instead of base_s, if that is less) + n / prefill_tokens_per_s
    + prefill_per_token2_s * (end^2 - start^2) beside its decodes. Zero means: not measured yet.
    """

    __pydantic_config__ = _STRICT

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_request_s: float = 0.0
    last_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_per_token2_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a llumlet publishes, or a gateway for a passive instance. Instance-level only: its size does not grow with requests.

    Capacities and demands are in tokens (whole blocks times block size). `sequence` rises with every report of one `incarnation`.
    """

    __pydantic_config__ = _STRICT

    instance: InstanceId
    incarnation: str
    sequence: int
    url: str
    state: InstanceState
    models: tuple[str, ...]
    engine: str
    """'vllm 0.32.0' or 'fake'."""
    capacity_tokens: int
    free_tokens: int
    block_tokens: int
    running: int
    waiting: int
    waiting_tokens: int
    """KV demand of the whole waiting queue."""
    head_tokens: int
    """KV demand of the queue's head; 0 if nothing waits."""
    head_tier: str
    oldest_waiting_s: float
    tiers: tuple[tuple[str, TierLoad], ...]
    preemptions: int
    migrations_in: int
    migrations_out: int
    max_batch: int
    max_model_tokens: int
    cost: StepCost = StepCost()
    kind: InstanceKind = InstanceKind.LLUMLET
    is_measured: bool = True
    """False: nothing tells the engine's load. Capacity, free and waiting tokens, running and waiting requests are then unknown, not zero:
    whoever chooses goes by the claims."""

    def to_json(self) -> str:
        """One line of JSON, with the report's version."""
        raw = encode(self)
        assert isinstance(raw, dict)
        return json.dumps({"version": REPORT_VERSION, **raw}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> "LoadReport":
        """Parse; raises ValueError (bad JSON, other version, missing or mistyped fields)."""
        if isinstance(text, str) and text.startswith(_HEAD):
            return _parser().validate_json("{" + text[len(_HEAD) :])
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("version", None) != REPORT_VERSION:
            raise ValueError("not a load report of version 1")
        return decode(LoadReport, raw)


_HEAD = f'{{"version":{REPORT_VERSION},'
"""How a report begins as `to_json` writes it: then it can be parsed in one step, in C."""


@cache
def _parser() -> TypeAdapter[LoadReport]:
    return TypeAdapter(LoadReport)
