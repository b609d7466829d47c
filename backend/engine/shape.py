"""PURE. What an engine is like: its limits, its way with prompts, and how long its steps take."""

from dataclasses import dataclass, field
from enum import StrEnum


class PrefillStyle(StrEnum):
    """How prompts and decodes share the engine."""

    FIRST = "first"
    """A prefill step of whole prompts, before any decode, whenever the head of the queue fits: the engines of 2023."""
    CHUNKED = "chunked"
    """One token budget a step, decodes first, the rest to chunks of prompts: vLLM V1."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """All in seconds. The defaults are in the order of a 7 B model on one data-centre GPU.

    decode  = decode_base_s + decode_per_token_s * context tokens of the batch + decode_per_request_s * batch
    prefill = prefill_base_s + prefill_per_token_s * new tokens + prefill_per_token2_s * (end**2 - start**2)
    A step with both shares one pass over the weights, so it pays the larger base once.
    """

    decode_base_s: float = 0.012
    decode_per_token_s: float = 2e-7
    decode_per_request_s: float = 2e-5
    prefill_base_s: float = 0.012
    prefill_per_token_s: float = 1e-4
    prefill_per_token2_s: float = 1e-9

    def step_s(self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_tokens2: int) -> float:
        """Seconds for a step of `decodes` requests over `context_tokens`, and `prefill_tokens` new prompt tokens."""
        base_s = self.decode_base_s if decodes else 0.0
        work_s = self.decode_per_token_s * context_tokens + self.decode_per_request_s * decodes
        if prefill_tokens:
            base_s = max(base_s, self.prefill_base_s)
            work_s += self.prefill_per_token_s * prefill_tokens + self.prefill_per_token2_s * prefill_tokens2
        return base_s + work_s


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engine's limits. `watermark` is the share of blocks that admission leaves free, so that running requests can grow."""

    capacity_blocks: int
    block_tokens: int = 16
    watermark: float = 0.01
    max_batch: int = 256
    max_prefill_tokens: int = 2048
    max_model_tokens: int = 4096
    style: PrefillStyle = PrefillStyle.CHUNKED
    cost: CostModel = field(default_factory=CostModel)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_tokens)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.capacity_blocks)
