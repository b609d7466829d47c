"""PURE. Deadlines and bounds of a migration, as values. Whoever reads the environment builds them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The source's side."""

    prepare_timeout_s: float = 10.0
    """Prepare to Prepared, and the opening of a channel."""
    message_timeout_s: float = 5.0
    """Any other message to its answer (Commit: in addition to the time its blocks may take)."""
    first_token_timeout_s: float = 60.0
    """How long a request in prefill is waited for."""
    freeze_timeout_s: float = 10.0
    """Freeze and thaw."""
    pair_timeout_s: float = 10.0
    """How long other migrations to the same peer are waited for; less than the destination's reservation_timeout_s."""
    copy_slack_s: float = 5.0
    copy_floor_bytes_per_s: float = 10e6
    """A transfer may take copy_slack_s + bytes / copy_floor_bytes_per_s."""
    resolve_timeout_s: float = 10.0
    """After a Commit without an answer: how long to ask what became of it before the request is given up."""
    resolve_pause_s: float = 0.1
    """Between two such questions."""
    cancel_tries: int = 2
    max_stages: int = 8
    """Transfers of one migration, the last one included."""
    last_stage_blocks: int = 2
    """Freeze once no more complete blocks than this are left to copy."""
    head_room_blocks: int = 2
    """Memory asked for beyond the tokens so far and what decoding adds while a stage is copied."""

    def copy_timeout_s(self, copied_bytes: int) -> float:
        """Seconds that a transfer of so many bytes may take."""
        return self.copy_slack_s + copied_bytes / self.copy_floor_bytes_per_s


@dataclass(frozen=True, slots=True)
class ReceptionSettings:
    """The destination's side."""

    max_migrations_in: int = 4
    """Legs admitted here and not yet owned."""
    prepare_timeout_s: float = 10.0
    reserve_timeout_s: float = 5.0
    activate_timeout_s: float = 5.0
    discard_timeout_s: float = 10.0
    reservation_timeout_s: float = 15.0
    """A reservation without a message for this long is dropped (not while blocks are being received)."""
    remember_s: float = 120.0
    """Answers are remembered for this long after a leg's end, and void legs refused; longer than any message can be under way."""
    copy_slack_s: float = 10.0
    copy_floor_bytes_per_s: float = 10e6
    """A receive may take copy_slack_s + bytes / copy_floor_bytes_per_s."""

    def copy_timeout_s(self, copied_bytes: int) -> float:
        """Seconds that a receive of so many bytes may take."""
        return self.copy_slack_s + copied_bytes / self.copy_floor_bytes_per_s
