"""Every knob of the gateway, with its unit, default and meaning. The gateway's only reader of the environment."""

import ipaddress
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.passive.reading import Passive, passive_at


class GatewaySettings(BaseSettings):
    """Frozen; built once, in `__main__`, from `MIDSTREAM_*` variables, an `.env` file and keyword arguments.

    Raises pydantic.ValidationError for malformed values. The prefix is shared with the backends, so names of theirs are ignored.
    """

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_", env_file=".env", extra="ignore", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose.")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="The shared store. `memory://` keeps it inside this process, which is the default when MIDSTREAM_BACKENDS is set.",
    )
    backends: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Base URLs of plain OpenAI servers (`vllm serve`) to watch and use, separated by commas."
    )
    backend_api_key: SecretStr | None = Field(
        default=None, description="Key with which such servers are asked for their models. Requests carry their client's own."
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that serve the port together; more than one need a Redis.")
    metrics_dir: Path | None = Field(
        default=None, description="Where workers keep the metrics that they show together. Set by their supervisor, not by hand."
    )
    admin_token: SecretStr | None = Field(
        default=None, description="Bearer token for /admin. Unset: /admin works only when the gateway listens on loopback."
    )
    gateway_id: str = Field(
        default_factory=lambda: f"g-{secrets.token_hex(3)}", min_length=1, description="Name of this replica in claims; random if unset."
    )
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$", description="Least severe level that is logged.")

    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="Bytes of a request body, at most; more is answered 413.")
    max_answer_bytes: int = Field(
        default=64 * 2**20, gt=0, description="Largest answer held in memory (a plain one, or one event of a stream), in bytes."
    )
    body_timeout_s: float = Field(default=60.0, gt=0, description="Seconds a client may take to send its body.")
    connect_timeout_s: float = Field(default=5.0, gt=0, description="Seconds to connect to an instance.")
    attempt_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds an instance may take to its first event before another one is tried."
    )
    first_byte_timeout_s: float = Field(
        default=300.0, gt=0, description="Seconds from a request's arrival to its first byte, over all attempts; then 504."
    )
    max_attempts: int = Field(default=3, ge=1, description="Instances tried, at most, before a failure is shown to the client.")
    idle_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds an instance may be silent in mid-answer before it counts as dead."
    )
    attach_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds to wait, once a request has moved, for the attachment to its new instance."
    )
    keepalive_interval_s: float = Field(
        default=15.0, ge=0, description="Seconds of silence after which an open stream gets an SSE comment. 0 switches that off."
    )

    suspect_s: float = Field(
        default=5.0, ge=0, description="Seconds for which an instance that could not be reached is used only if there is no other."
    )
    claim_ttl_s: float = Field(default=15.0, gt=0, description="Seconds a claim outlives a gateway that died; renewed at a third of it.")
    report_stale_s: float = Field(default=5.0, gt=0, description="Age, in seconds, from which a load report is not believed any more.")
    view_max_age_s: float = Field(default=0.02, ge=0, description="Seconds for which one look at the store serves several requests.")
    store_timeout_s: float = Field(default=1.0, gt=0, description="Seconds the shared store may take to answer one question.")
    store_retry_s: float = Field(default=1.0, gt=0, description="Seconds the store is left alone after it failed.")

    aliases: dict[str, str] = Field(
        default_factory=dict,
        description='Other names of models, as JSON: {"alias": "model"}. Requests for an alias go on with the model\'s name.',
    )
    response_ttl_s: float = Field(
        default=3600.0, gt=0, description="Seconds for which it is remembered which instance stores a response of /v1/responses."
    )
    passive_poll_s: float = Field(default=0.5, gt=0, description="Seconds between two looks at a plain OpenAI server.")
    passive_timeout_s: float = Field(default=2.0, gt=0, description="Seconds such a server may take to answer one question about itself.")
    passive_max_batch: int = Field(
        default=256, ge=1, description="Requests that such a server runs at once, as far as we know: it does not tell."
    )
    answer_timeout_s: float = Field(
        default=1800.0, gt=0, description="Seconds such a server may take for an answer that does not stream, before 504."
    )

    admin_timeout_s: float = Field(default=1.0, gt=0, description="Seconds an instance may take to list its requests.")
    migration_timeout_s: float = Field(default=300.0, gt=0, description="Seconds an ordered migration may take in all.")
    max_queued_events: int = Field(
        default=1000, ge=1, description="Events that wait for one listener of /admin/events, at most; then it loses the oldest."
    )
    switch_wait_s: float = Field(default=2.0, ge=0, description="Seconds to wait, after a migration, for the downtime its client saw.")
    switch_ttl_s: float = Field(default=300.0, gt=0, description="Seconds for which a measured downtime can be read.")
    shutdown_grace_s: float = Field(default=30.0, ge=0, description="Seconds running requests get to finish when the gateway stops.")

    @field_validator("backends", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("backends")
    @classmethod
    def _check(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            passive_at(address)
        return value

    @property
    def passive_backends(self) -> tuple[Passive, ...]:
        """The plain OpenAI servers to watch."""
        return tuple(passive_at(address) for address in self.backends)

    @property
    def store_url(self) -> str:
        """Where the shared state is: beside passive backends, and if nothing else was said, in this process."""
        return "memory://" if self.backends and "redis_url" not in self.model_fields_set else self.redis_url

    @property
    def backend_secret(self) -> str | None:
        """The key for passive backends; None if unset or empty."""
        return (self.backend_api_key.get_secret_value() or None) if self.backend_api_key else None

    @property
    def admin_secret(self) -> str | None:
        """The admin token; None if unset or empty."""
        return (self.admin_token.get_secret_value() or None) if self.admin_token else None

    @property
    def listens_on_loopback(self) -> bool:
        """True if nobody outside this machine can reach the gateway."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def worker_environment(settings: GatewaySettings, name: str, metrics: Path) -> Mapping[str, str]:
    """The environment of one worker: this process's, with what flags have changed, a name of its own and shared metrics."""
    changed = {
        "MIDSTREAM_HOST": settings.host,
        "MIDSTREAM_PORT": str(settings.port),
        "MIDSTREAM_REDIS_URL": settings.redis_url,
        "MIDSTREAM_BACKENDS": ",".join(settings.backends),
        "MIDSTREAM_WORKERS": "1",
        "MIDSTREAM_GATEWAY_ID": name,
        "MIDSTREAM_METRICS_DIR": str(metrics),
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
    }
    return {**os.environ, **changed}
