"""PURE. What two llumlets say to each other about one leg. Every message is idempotent; the answer to a repetition is the same.

    source                      destination
    Prepare    ->               <- Prepared | Refusal
    Reserve    ->               <- Reserved | Refusal      (asks for memory and posts the receive of one stage)
    Commit     ->               <- Committed | Refusal     (hands the request over, with its last blocks in flight)
    Cancel     ->               <- Cancelled
    Query      ->               <- StateIs                 (resolves a lost answer)

`leg` is always the NEW leg: (request, an epoch never tried before).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from migration.leg import InstanceId, Leg
from migration.plan import MigrationMode


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What must be equal on both sides for KV blocks to be exchanged as bytes."""

    model: str
    dtype: str
    block_tokens: int
    block_bytes: int
    """Bytes of one block over all layers of one rank."""
    layers: int
    ranks: int
    """Tensor-parallel size; rank r sends to rank r."""
    shape: str
    """The shape of one layer's block as text, e.g. '3x32x128': a check on head counts and packing."""
    version: str = ""
    """Name and version of the engine, e.g. 'vllm 0.32.0'."""


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """How the destination's workers reach the source's workers: one address a rank, and the incarnation of the pair."""

    kind: str
    """'gloo', 'nccl', 'socket' or 'memory'."""
    incarnation: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The original HTTP request, to be handled again at the destination. Header names are lower case."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One generated token: its id and, where the request asked for log-probabilities, the engine's own figures for it.

    `logprobs` is (token ids, log-probabilities, rank of the sampled token) as the engine gave them, or None.
    """

    token: int
    logprobs: tuple[tuple[int, ...], tuple[float, ...], int] | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask the destination to admit a request: handle `http` up to the point where the engine would start."""

    leg: Leg
    source: InstanceId
    mode: MigrationMode
    http: HttpRequest
    created: int | None
    """The `created` second that the client has already been shown, if any."""
    steps: tuple[TokenStep, ...]
    """Tokens generated so far."""
    prompt_tokens: int
    room_tokens: int
    """Tokens (prompt, output and head room) to reserve memory for; 0 if nothing is to be copied."""
    layout: KVLayout
    channel: ChannelOffer | None
    tier: str = "normal"
    prefill: tuple[int, int] | None = None
    """Of the prompt's tokens, how many its engine found in the prefix cache, and how many it wrote there, which usage may tell of."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Admitted. The first `cached_tokens` tokens (whole blocks) lie in the destination's prefix cache and need not be sent."""

    leg: Leg
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold memory for `room_tokens` in all and get ready to receive blocks [first_block, end_block) as transfer number `transfer`."""

    leg: Leg
    room_tokens: int
    transfer: int
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory held, receive posted."""

    leg: Leg
    transfer: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The hand-over: after Committed the destination owns the request.

    `steps` are the tokens since Prepare. `computed_tokens` is how many tokens of prompt + output have their KV in the copied
    blocks (all but the newest token), or 0 when nothing was copied. Blocks [first_block, end_block) come as transfer `transfer`
    while this message travels (none if the range is empty). `sampler` is the engine's opaque random state, one entry a rank.
    """

    leg: Leg
    steps: tuple[TokenStep, ...]
    computed_tokens: int
    transfer: int
    first_block: int
    end_block: int
    sampler: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The destination owns the request and runs it."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget the reservation. Answered Cancelled even if there is none."""

    leg: Leg
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The leg is void: what it held is free once no receive writes into it any more.

    `owner` is true if it was committed already and therefore stays: the cancel had no effect.
    """

    leg: Leg
    owner: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """What became of the leg?"""

    leg: Leg


class LegState(StrEnum):
    """What a destination knows about a leg."""

    UNKNOWN = "unknown"
    RESERVED = "reserved"
    OWNER = "owner"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class StateIs:
    """The answer to Query. UNKNOWN and DROPPED are promises: a Commit arriving later will be refused."""

    leg: Leg
    state: LegState


@dataclass(frozen=True, slots=True)
class Refusal:
    """No. `reason` is a short snake_case word fit for a metric label; `detail` is for people."""

    leg: Leg
    reason: str
    detail: str = field(default="")


Message = Prepare | Reserve | Commit | Cancel | Query
Answer = Prepared | Reserved | Committed | Cancelled | StateIs | Refusal
