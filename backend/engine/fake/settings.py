"""The knobs of the fake engine, and the only reader of its environment variables."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from backend.engine.shape import CostModel, EngineShape, PrefillStyle


class FakeSettings(BaseSettings):
    """Each field is an environment variable, MIDSTREAM_FAKE_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_FAKE_", env_file=".env", extra="ignore", frozen=True)

    model: str = Field(default="fake", description="Name the model is served under.")
    capacity_blocks: int = Field(default=1024, ge=1, description="KV blocks of the engine.")
    block_tokens: int = Field(default=16, ge=1, description="Tokens in a KV block.")
    kv_bytes_per_block: int = Field(default=2048, ge=16, description="Bytes of one KV block; a multiple of block_tokens.")
    prefix_cache: bool = Field(default=True, description="Reuse the blocks of a known prefix.")
    watermark: float = Field(default=0.01, ge=0, lt=1, description="Share of blocks that admission leaves free.")
    style: PrefillStyle = Field(default=PrefillStyle.CHUNKED, description="'chunked' (vLLM V1) or 'first' (whole prompts before decodes).")
    max_batch: int = Field(default=64, ge=1, description="Requests in one step.")
    max_prefill_tokens: int = Field(
        default=2048, ge=1, description="Tokens in one step (chunked), or of prompts in one prefill step (first)."
    )
    max_model_tokens: int = Field(default=8192, ge=2, description="Longest prompt and output together, in tokens.")
    decode_base_s: float = Field(default=0.012, ge=0, description="Seconds of a decode step, whatever is in it.")
    decode_per_token_s: float = Field(default=2e-7, ge=0, description="Seconds added by each context token of the batch.")
    decode_per_request_s: float = Field(default=2e-5, ge=0, description="Seconds added by each request of the batch.")
    prefill_base_s: float = Field(default=0.012, ge=0, description="Seconds of a prefill step, whatever is in it.")
    prefill_per_token_s: float = Field(default=1e-4, ge=0, description="Seconds added by each prompt token.")
    prefill_per_token2_s: float = Field(default=1e-9, ge=0, description="Seconds added by each squared prompt token.")
    time_scale: float = Field(default=1.0, ge=0, description="Factor on all step times; 0 = as fast as possible.")
    eos_one_in: int = Field(default=256, ge=0, description="The model ends its answer at one token in so many; 0 = never by itself.")
    copy_bytes_per_s: float = Field(default=0, ge=0, description="Cap on KV bytes sent a second and transfer; 0 = no cap.")
    channel_host: str = Field(
        default="", description="Address at which other backends reach this one's KV channel; '' = the host it listens on."
    )
    channel_timeout_s: float = Field(default=10.0, gt=0, description="Longest silence of a KV channel, in seconds.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_model_tokens > self.capacity_blocks * self.block_tokens:
            raise ValueError("max_model_tokens do not fit in capacity_blocks * block_tokens")
        if self.kv_bytes_per_block % self.block_tokens:
            raise ValueError("kv_bytes_per_block must be a multiple of block_tokens")
        return self

    def shape(self) -> EngineShape:
        """The engine's limits, step times scaled."""
        return EngineShape(
            capacity_blocks=self.capacity_blocks,
            block_tokens=self.block_tokens,
            watermark=self.watermark,
            max_batch=self.max_batch,
            max_prefill_tokens=self.max_prefill_tokens,
            max_model_tokens=self.max_model_tokens,
            style=self.style,
            cost=CostModel(
                decode_base_s=self.decode_base_s * self.time_scale,
                decode_per_token_s=self.decode_per_token_s * self.time_scale,
                decode_per_request_s=self.decode_per_request_s * self.time_scale,
                prefill_base_s=self.prefill_base_s * self.time_scale,
                prefill_per_token_s=self.prefill_per_token_s * self.time_scale,
                prefill_per_token2_s=self.prefill_per_token2_s * self.time_scale,
            ),
        )
