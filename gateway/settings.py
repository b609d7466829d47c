"""Every knob of the gateway, with its unit, default and meaning. The gateway's only reader of the environment."""

import ipaddress
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from backend.peers.settings import PeerSettings
from backend.registry.address import checked_store
from gateway.passive.reading import Passive, passive_at
from gateway.policy.config import Policy, ScaleConfig, policy_config
from gateway.policy.tier import Tiers, override_tiers


class GatewaySettings(PeerSettings):
    """Frozen; built once, in `__main__`, from `MIDSTREAM_*` variables, an `.env` file and keyword arguments.

    Raises pydantic.ValidationError for malformed values. The prefix is shared with the backends, so names of theirs are ignored.
    """

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose.")
    redis_url: Annotated[str, AfterValidator(checked_store)] = Field(
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
    admin_token: SecretStr | None = Field(
        default=None, description="Bearer token for /admin. Unset: /admin works only when the gateway listens on loopback."
    )
    gateway_id: str = Field(
        default_factory=lambda: f"g-{secrets.token_hex(3)}", min_length=1, description="Name of this replica in claims; random if unset."
    )
    request_log: Path | None = Field(
        default=None, description="File that gets one JSON line for each request that is over, for `midstream trace`. Unset: none."
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
    hang_timeout_s: float = Field(
        default=3.0,
        gt=0,
        description="Seconds without an event (tier high: half, batch: twice as long; never under 20 of the instance's steps) from which "
        "an instance whose load reports have stopped, too, counts as dead.",
    )
    resume_wait_s: float = Field(
        default=30.0, ge=0, description="Seconds to wait for an instance that can go on with an answer whose own is gone."
    )
    max_resumes: int = Field(default=8, ge=0, description="How often one request may go on elsewhere after its instance was gone.")
    max_remembered_tokens: int = Field(
        default=64 * 2**20, ge=0, description="Token ids (4 bytes each) remembered for going on elsewhere, at most, over all requests."
    )
    max_remembered_request_tokens: int = Field(default=2**20, ge=0, description="The same for one request.")
    resumable_ttl_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds for which the client of a stream with `x-midstream-resumable: 1` may come back after it was last written to.",
    )
    resumable_interval_s: float = Field(
        default=0.25, gt=0, description="Seconds between two times that the new tokens of such a stream are written to the store."
    )
    resumable_wait_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds that a client who comes back waits, at most, until the gateway it comes from has written what it has seen.",
    )
    resumable_max_body_bytes: int = Field(
        default=2**20, ge=0, description="Bytes of the body of such a request, at most; with more its client cannot come back."
    )
    resumable_max_tokens: int = Field(
        default=65536, ge=0, description="Token ids of such a stream kept in the store, at most; those that follow are computed again."
    )
    keepalive_interval_s: float = Field(
        default=15.0, ge=0, description="Seconds of silence after which an open stream gets an SSE comment. 0 switches that off."
    )

    suspect_s: float = Field(
        default=5.0, ge=0, description="Seconds for which an instance that could not be reached is used only if there is no other."
    )
    claim_ttl_s: float = Field(default=15.0, gt=0, description="Seconds a claim outlives a gateway that died; renewed at a third of it.")
    report_stale_s: float = Field(default=5.0, gt=0, description="Age, in seconds, from which a load report is not believed any more.")
    view_max_age_s: float = Field(
        default=0.02,
        ge=0,
        description="Seconds for which one look at the store serves several requests; twice as long while the next is made.",
    )
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

    decisions_kept: int = Field(default=1000, ge=0, description="Decisions that /admin/decisions can tell of: the latest so many.")
    log_decisions: str = Field(
        default="moves",
        pattern="^(none|moves|all)$",
        description="Decisions that are lines of JSON in the log, with all that was seen: `none`, `moves`, or `all`. With all, each "
        "dispatch is a line of some hundred bytes for each instance.",
    )

    policy: str = Field(
        default="midstream",
        description="What decides where requests go: midstream, llumnix, infaas, least_outstanding or round_robin (docs/policies.md).",
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict,
        description="The policy's parameters, as a JSON object (docs/policies.md); those left out have their defaults.",
    )
    tiers: dict[str, dict[str, Any] | None] = Field(
        default_factory=dict,
        description="Changes to the tiers high, normal and batch, as a JSON object by name: rank, weight, queue_limit, patience_s, "
        "sheddable, ttft_objective_s, tpot_objective_s; null removes a tier (docs/line.md).",
    )
    default_tier: str = Field(default="normal", description="The tier of requests that ask for none, or for one that is not known.")
    line_limit: int = Field(
        default=20_000, ge=1, description="Requests that wait for one model in all gateways together, at most; then lower tiers are shed."
    )
    line_window: int = Field(
        default=256, ge=1, description="Requests at the head of a line that are considered at each look; those behind wait for them."
    )
    line_ttl_s: float = Field(
        default=5.0, gt=0, description="Seconds a place in line outlives a gateway that died; renewed at a third of it."
    )
    line_poll_s: float = Field(default=0.5, gt=0, description="Seconds after which a gateway looks at the line even if nothing told it to.")
    line_interval_s: float = Field(default=0.005, ge=0, description="Seconds between two looks at the line, at least.")

    admin_timeout_s: float = Field(default=1.0, gt=0, description="Seconds an instance may take to list its requests.")
    migration_timeout_s: float = Field(default=300.0, gt=0, description="Seconds an ordered migration may take in all.")
    max_queued_events: int = Field(
        default=1000, ge=1, description="Events that wait for one listener of /admin/events, at most; then it loses the oldest."
    )
    switch_wait_s: float = Field(default=2.0, ge=0, description="Seconds to wait, after a migration, for the downtime its client saw.")
    switch_ttl_s: float = Field(default=300.0, gt=0, description="Seconds for which a measured downtime can be read.")

    autoscale: ScaleConfig | None = Field(
        default=None,
        description="The rule by which instances are started and stopped, in JSON, e.g. "
        '{"name": "demand", "min_instances": 1, "max_instances": 8}; docs/scaling.md. Unset: none. Needs a launcher.',
    )
    autoscale_interval_s: float = Field(default=1.0, gt=0, description="Seconds between two looks of the auto-scaler.")
    launcher_url: str | None = Field(
        default=None,
        description="Base URL of the launcher that starts and stops instances (docs/scaling.md). Unset: they come and go by hand.",
    )
    launcher_token: SecretStr | None = Field(default=None, description="Bearer token that the launcher asks for.")
    launcher_timeout_s: float = Field(default=5.0, gt=0, description="Seconds the launcher may take to answer one question.")
    lease_ttl_s: float = Field(
        default=15.0, gt=0, description="Seconds after which another gateway takes over what one that died was at work on."
    )
    operations_interval_s: float = Field(default=0.25, gt=0, description="Seconds between two looks at operations that are under way.")
    operation_ttl_s: float = Field(default=86400.0, gt=0, description="Seconds for which an operation that is over can be read.")
    scale_start_timeout_s: float = Field(
        default=900.0, gt=0, description="Seconds a started instance may take until it is ready; then it is stopped and tried again."
    )
    scale_drain_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds a draining instance may take to get rid of its requests before it is told to stop all the same.",
    )
    scale_retry_s: float = Field(
        default=1.0, gt=0, description="Seconds until a failed start or stop is tried again; doubled with each failure."
    )
    scale_max_retry_s: float = Field(default=60.0, gt=0, description="Seconds between two such attempts, at most.")
    scale_attempts: int = Field(default=5, ge=1, description="Attempts to start or to stop an instance before its operation fails.")

    shutdown_grace_s: float = Field(default=30.0, ge=0, description="Seconds running requests get to finish when the gateway stops.")

    @field_validator("backends", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("backends")
    @classmethod
    def _check_backends(cls, value: tuple[str, ...]) -> tuple[str, ...]:
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

    @model_validator(mode="after")
    def _check_launcher(self) -> Self:
        if self.autoscale is not None and not self.launcher_url:
            raise ValueError("MIDSTREAM_AUTOSCALE needs MIDSTREAM_LAUNCHER_URL")
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        """Raises ValueError (shown by pydantic) for a policy or tiers that cannot be built."""
        self.build_policy()
        return self

    def build_policy(self) -> Policy:
        """The policy, with this gateway's tiers."""
        return policy_config(self.policy, self.policy_options).build(self.tier_table)

    @property
    def tier_table(self) -> Tiers:
        """All tiers."""
        return override_tiers(self.tiers, self.default_tier)

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
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
    }
    return {**os.environ, **changed}
