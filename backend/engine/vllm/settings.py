"""The knobs of carrying KV blocks out of and into vLLM, with their units; the only reader of the environment here."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class KVSettings(BaseSettings):
    """Read from the environment (prefix MIDSTREAM_KV_) and from `.env`."""

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_KV_", env_file=".env", extra="ignore", frozen=True)

    host: str = Field(
        default="", description="Host or address under which other instances' workers reach this one's. Default: the backend's own host."
    )
    chunk_bytes: int = Field(
        default=16 * 1024 * 1024, gt=0, description="Bytes of KV blocks per message; two buffers of this size are kept per channel."
    )
    bytes_per_s: float = Field(default=0.0, ge=0, description="Bytes per second that one transfer may take of the link; 0 means no cap.")
    order_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds to wait for the scheduler, which answers between two steps: longer than the longest prefill step.",
    )
    channel_timeout_s: float = Field(default=10.0, gt=0, description="Seconds to open a channel, and between two messages on it.")
    copy_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that one transfer may take.")
