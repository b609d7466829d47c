"""Every knob of a llumlet, with its unit and reason; the only reader of the environment here."""

import secrets
from typing import Annotated

from pydantic import AfterValidator, Field

from backend.peers.settings import PeerSettings
from backend.registry.address import checked_redis
from migration.settings import ReceptionSettings, SessionSettings


def _random_instance_id() -> str:
    return f"i-{secrets.token_hex(3)}"


class LlumletSettings(PeerSettings):
    """Read from the environment (prefix MIDSTREAM_) and from `.env`; a malformed value stops the process."""

    redis_url: Annotated[str, AfterValidator(checked_redis)] | None = Field(
        default=None,
        description="URL of the shared store, e.g. redis://127.0.0.1:6379/0. Without one no gateway learns of this instance.",
    )
    instance_id: str = Field(
        default_factory=_random_instance_id,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name of this instance, unique in the fleet. Default: random, i-xxxxxx.",
    )
    advertised_url: str = Field(
        default="",
        description="Base URL under which gateways and other backends reach this one. Default: http://HOST:PORT of the listening socket.",
    )

    signature_window_s: float = Field(
        default=60.0, gt=0, description="Seconds by which the clock of another host may differ before what it signs is refused."
    )
    allow_direct: bool = Field(
        default=False, description="With a fleet secret: serve OpenAI requests of anybody too, instead of the gateways' alone."
    )

    report_interval_s: float = Field(default=0.05, gt=0, description="Seconds between two load reports, at least, when nothing is urgent.")
    report_urgent_interval_s: float = Field(
        default=0.005, ge=0, description="Seconds between two load reports, at least, when memory was freed or a request came or went."
    )
    report_heartbeat_s: float = Field(default=1.0, gt=0, description="Seconds between two load reports, at most.")
    report_ttl_s: float = Field(default=10.0, gt=0, description="Seconds after which a report that was not renewed is forgotten.")
    store_timeout_s: float = Field(default=1.0, gt=0, description="Seconds the shared store may take to answer one question.")

    attach_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds that a request which moved here is run without a gateway attached to its stream."
    )
    admit_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds an arriving request may take from its HTTP handler's start to the engine's shell."
    )
    stream_buffer_bytes: int = Field(
        default=4 * 1024 * 1024,
        gt=0,
        description="Bytes of an arrived request's stream that wait for its reader before the request is held back; as many are kept for a "
        "second attachment.",
    )
    resume_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds the engine may take to queue a resumed request once its known tokens are replayed."
    )
    unwind_timeout_s: float = Field(
        default=0.5,
        ge=0,
        description="Seconds the engine's handler may take to end by itself after its client has left; then it is cancelled.",
    )
    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0, description="Bytes of a request body, at most; more is answered 413.")

    link_connect_timeout_s: float = Field(default=2.0, gt=0, description="Seconds to connect to another backend.")
    link_connections: int = Field(default=64, gt=0, description="Connections kept to each other backend, at most.")
    max_migrations_out: int = Field(default=8, gt=0, description="Requests leaving this instance at the same time, at most.")
    max_migrations_in: int = Field(default=4, gt=0, description="Requests arriving at this instance at the same time, at most.")

    prepare_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds for another backend to admit a request that is to move there."
    )
    message_timeout_s: float = Field(default=5.0, gt=0, description="Seconds for another backend to answer any other migration message.")
    first_token_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a request in prefill is waited for before it moves.")
    freeze_timeout_s: float = Field(default=10.0, gt=0, description="Seconds for the engine to freeze or thaw a request.")
    resolve_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds to ask what became of a hand-over without an answer before the request is given up."
    )
    copy_slack_s: float = Field(
        default=5.0, gt=0, description="Seconds that a copy of KV blocks may take in addition to its size at the least speed."
    )
    copy_floor_bytes_per_s: float = Field(
        default=10e6, gt=0, description="Bytes a second below which a copy of KV blocks is considered stuck."
    )
    max_stages: int = Field(default=8, ge=1, description="Copy stages of one migration, at most, the last one included.")
    last_stage_blocks: int = Field(default=2, ge=0, description="KV blocks left to copy, at most, when the request is frozen.")
    head_room_blocks: int = Field(default=2, ge=0, description="KV blocks reserved at the destination beyond what the copy needs.")
    reservation_timeout_s: float = Field(
        default=15.0, gt=0, description="Seconds without a word after which the reservation of an arriving request is dropped."
    )

    drain_deadline_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to move away or end after SIGTERM before they are given up."
    )
    drain_retry_s: float = Field(
        default=0.25,
        gt=0,
        description="Seconds until a request that could not move away from a draining instance is tried again; doubled up to four times.",
    )
    drain_retry_after_s: int = Field(default=1, ge=0, description="Retry-After, in seconds, of a request refused while draining.")
    shutdown_timeout_s: float = Field(default=3.0, ge=0, description="Seconds that open connections get to close once drained.")

    def session(self) -> SessionSettings:
        """The knobs of migrations away from here."""
        return SessionSettings(
            prepare_timeout_s=self.prepare_timeout_s,
            message_timeout_s=self.message_timeout_s,
            first_token_timeout_s=self.first_token_timeout_s,
            freeze_timeout_s=self.freeze_timeout_s,
            resolve_timeout_s=self.resolve_timeout_s,
            copy_slack_s=self.copy_slack_s,
            copy_floor_bytes_per_s=self.copy_floor_bytes_per_s,
            max_stages=self.max_stages,
            last_stage_blocks=self.last_stage_blocks,
            head_room_blocks=self.head_room_blocks,
        )

    def reception(self) -> ReceptionSettings:
        """The knobs of requests that arrive here."""
        return ReceptionSettings(
            max_migrations_in=self.max_migrations_in,
            prepare_timeout_s=self.prepare_timeout_s,
            reservation_timeout_s=self.reservation_timeout_s,
            copy_floor_bytes_per_s=self.copy_floor_bytes_per_s,
        )
