"""What a migration needs of the world: of the engine that holds the request, of the one that takes it, of whoever serves
arriving requests, and of the link between.

Every method is bounded by a deadline of its implementer or of the session that calls it; none waits for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from migration.leg import InstanceId, Leg
from migration.messages import Answer, ChannelOffer, KVLayout, Message, Prepare, TokenStep


class Phase(StrEnum):
    """Where a request is in its engine."""

    WAITING = "waiting"
    """Queued or preempted: it holds no KV worth copying."""
    PREFILL = "prefill"
    """Running, but no output token yet."""
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Progress:
    """A look at a request from outside the batch. Blocks up to `settled_tokens` are complete and final: safe to copy while it runs."""

    phase: Phase
    prompt_tokens: int
    output_tokens: int
    settled_tokens: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A request out of its batch, nothing of it in flight, its blocks pinned.

    `steps` is the whole output. `computed_tokens` tokens have their KV in memory (all but the newest one; 0 for a request that
    was waiting). `sampler` is the engine's opaque random state, one entry a rank.
    """

    steps: tuple[TokenStep, ...]
    prompt_tokens: int
    computed_tokens: int
    sampler: tuple[bytes, ...]


class SourceEngine(Protocol):
    """The engine a request leaves. `leg` is the CURRENT leg of the request on this instance."""

    def layout(self) -> KVLayout: ...

    def check_movable(self, leg: Leg) -> None:
        """Raise Unmovable(reason) if this request cannot be carried exactly, RequestEnded if it is not here."""

    async def look(self, leg: Leg) -> Progress:
        """Where the request stands. Raises RequestEnded."""

    def steps(self, leg: Leg) -> tuple[TokenStep, ...]:
        """The output tokens this side has seen so far (may lag behind the engine by what is in flight)."""

    async def wait_first_token(self, leg: Leg) -> None:
        """Return when the request has an output token. Raises RequestEnded."""

    async def offer_channel(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        """An open or opening channel to that instance; `fresh` drops a cached one first."""

    async def send_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
        """Send these blocks of the request (indices within it). Returns bytes sent over all ranks. Raises ChannelError.

        The other side has posted the receive. An empty range calls the transfer off: the receiver is told that nothing comes, even if the
        request is gone by now. Always either sends or tells the receiver that nothing comes, also when cancelled; until
        nothing reads the blocks any more, they stay pinned. A channel that failed is not used again.
        """

    async def freeze(self, leg: Leg) -> Frozen:
        """Take the request out of the batch at a step boundary and drain what is in flight. Raises RequestEnded."""

    async def thaw(self, leg: Leg) -> None:
        """Put a frozen request back into the batch; it goes on as if nothing had been. No error if it is gone.

        Idempotent; legal, too, after a freeze that failed or was cancelled half-way.
        """

    async def wait_ended(self, leg: Leg) -> None:
        """Return when the request has finished or its client has left (its HTTP exchange here is over)."""


class DestinationEngine(Protocol):
    """The engine a request comes to. `leg` is the NEW leg. The request has been handed to the engine as a *shell*: known, not running."""

    def layout(self) -> KVLayout: ...

    async def accept_channel(self, peer: InstanceId, offer: ChannelOffer) -> None:
        """Join the channel (instant if this incarnation is open). Raises ChannelError, ChannelUnknown."""

    async def reserve(self, leg: Leg, steps: Sequence[TokenStep], room_tokens: int) -> int:
        """Hold memory for the shell; may be called again with more room. Returns tokens found in the prefix cache (first call).

        Raises Refused(reason='no_memory' | ...), RequestEnded.
        """

    async def receive_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> None:
        """Receive blocks of the request into the reserved memory. Returns when they are in place. Raises ChannelError."""

    async def adopt(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        """Make ready what an activation with the same arguments needs besides the blocks: it is called while the last ones come.

        Raises RequestEnded, Refused. The activation may never follow.
        """

    async def activate(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int) -> None:
        """Make the shell, once adopted, a running request whose whole output so far is `steps`. Raises RequestEnded, Refused."""

    async def discard(self, leg: Leg) -> None:
        """Forget the shell and free its memory, once no receive writes into it any more. Idempotent."""


class Arrivals(Protocol):
    """Handles an arriving request at this instance. `leg` is the NEW leg."""

    async def admit(self, prepare: Prepare) -> None:
        """Start handling `prepare.http` here, with `prepare.steps` as the first replay tokens; return when the engine holds it as a
        shell. Raises Refused(reason), RequestEnded. If it raises or is cancelled, `drop` follows all the same.
        """

    def extend(self, leg: Leg, steps: Sequence[TokenStep]) -> None:
        """Feed more replay tokens (those of Commit). No error if the request has ended."""

    def finish(self, leg: Leg) -> None:
        """The replay is complete and this instance the owner: the engine goes on from here. No error if the request has ended."""

    async def drop(self, leg: Leg) -> None:
        """Stop handling it, here and now. Idempotent; no error for a leg never admitted."""

    async def wait_ended(self, leg: Leg) -> None:
        """Return when its HTTP handling here is over (finished, aborted, its client left); at once for an unknown leg."""


class Link(Protocol):
    """Carries messages to one peer llumlet."""

    async def ask(self, message: Message, timeout_s: float) -> Answer:
        """Send and return the answer. Raises LinkError (unknown whether it arrived) or PeerGone (certainly dead)."""
