"""Every knob of the gateway, with its unit, default and meaning. The gateway's only reader of the environment."""

import ipaddress
import secrets
from pathlib import Path

from pydantic import Field, SecretStr

from backend.peers.settings import PeerSettings


class GatewaySettings(PeerSettings):
    """Frozen; built once, in `__main__`, from `MIDSTREAM_*` variables, an `.env` file and keyword arguments.

    Raises pydantic.ValidationError for malformed values. The prefix is shared with the backends, so names of theirs are ignored.
    """

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

    api_keys_file: Path | None = Field(
        default=None,
        description="File of API keys, made by `midstream keys add`. Unset: nobody needs a key. Changes are seen by themselves.",
    )
    api_keys_poll_s: float = Field(default=1.0, gt=0, description="Seconds between two looks at the file of API keys.")
    max_streams: int = Field(
        default=0, ge=0, description="Requests served at the same time by one gateway, at most; then 503. 0: no limit."
    )

    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="Bytes of a request body, at most; more is answered 413.")
    max_answer_bytes: int = Field(
        default=64 * 2**20, gt=0, description="Largest answer held in memory (a plain one, or one event of a stream), in bytes."
    )
    max_header_bytes: int = Field(default=64 * 2**10, gt=0, description="Bytes of a request's line and headers, at most; more is a 431.")
    header_timeout_s: float = Field(default=20.0, gt=0, description="Seconds a client may take to send the head of a request.")
    body_timeout_s: float = Field(default=60.0, gt=0, description="Seconds a client may take to send its body.")
    write_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds a client may leave what was sent to it unread before its connection is closed."
    )
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
