"""Every knob of the gateway, with its unit, default and meaning. The gateway's only reader of the environment."""

import ipaddress
import secrets

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class GatewaySettings(BaseSettings):
    """Frozen; built once, in `__main__`, from `MIDSTREAM_*` variables, an `.env` file and keyword arguments.

    Raises pydantic.ValidationError for malformed values. The prefix is shared with the backends, so names of theirs are ignored.
    """

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_", env_file=".env", extra="ignore", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose.")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="The shared store. `memory://` keeps it inside this process.")
    admin_token: SecretStr | None = Field(
        default=None, description="Bearer token for /admin. Unset: /admin works only when the gateway listens on loopback."
    )
    gateway_id: str = Field(
        default_factory=lambda: f"g-{secrets.token_hex(3)}", min_length=1, description="Name of this replica in claims; random if unset."
    )
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$", description="Least severe level that is logged.")

    prometheus_dir: str | None = Field(
        default=None,
        validation_alias="PROMETHEUS_MULTIPROC_DIR",
        description="Directory in which the gateways of this machine add up their metrics, as prometheus-client does; it must exist, and "
        "be empty at the start. Unset: each tells its own.",
    )

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

    rebalance: bool = Field(default=True, description="Move running requests between instances as the policy says.")
    rebalance_lease_ttl_s: float = Field(
        default=1.5,
        gt=0,
        description="Seconds after which another gateway may take over the moving from one that died; renewed at least at a third of it.",
    )
    rebalance_cool_down_s: float = Field(
        default=1.0, ge=0, description="Seconds a request stays, at least, once it has moved; a policy's own cool-down may be longer."
    )
    rebalance_timeout_s: float = Field(
        default=1.0, gt=0, description="Seconds an instance may take to say which of its requests it would give away."
    )

    decisions_kept: int = Field(default=1000, ge=0, description="Decisions that /admin/decisions can tell of: the latest so many.")
    log_decisions: str = Field(
        default="moves",
        pattern="^(none|moves|all)$",
        description="Decisions that are lines of JSON in the log, with all that was seen: `none`, `moves`, or `all`. With all, each "
        "dispatch is a line of some hundred bytes for each instance.",
    )

    admin_timeout_s: float = Field(default=1.0, gt=0, description="Seconds an instance may take to list its requests.")
    migration_timeout_s: float = Field(default=300.0, gt=0, description="Seconds an ordered migration may take in all.")
    max_queued_events: int = Field(
        default=1000, ge=1, description="Events that wait for one listener of /admin/events, at most; then it loses the oldest."
    )
    switch_wait_s: float = Field(default=2.0, ge=0, description="Seconds to wait, after a migration, for the downtime its client saw.")
    switch_ttl_s: float = Field(default=300.0, gt=0, description="Seconds for which a measured downtime can be read.")
    shutdown_grace_s: float = Field(default=30.0, ge=0, description="Seconds running requests get to finish when the gateway stops.")

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
