"""PURE. The protocol as two tables without I/O: {(state, event): (new state, action)}. What is not in a table is a ProtocolError.

Each side has one action outstanding at a time; its result is the next event. ENDED, "the request finished or its client left", may come
instead in every state of the source that is not terminal.

The rules
1. A destination in RESERVED may be dropped by anyone (cancel, expiry, its shell ended); an OWNER never by a message.
2. Who said UNKNOWN, DROPPED, Cancelled (not owner) or Refusal will never own the leg: a Commit that comes later is refused.
3. The source puts the request back into its batch only before Commit was sent, after a promise by rule 2, or if the peer is dead.
   While it cannot know, it asks; when it may not ask any longer, it gives the request up. So there are never two owners.
"""

from enum import StrEnum

from migration.errors import ProtocolError
from migration.plan import MigrationResult


class SourceState(StrEnum):
    """Where a migration stands at the source."""

    LOOKING = "looking"
    PREPARING = "preparing"
    ANNOUNCING = "announcing"
    PLANNING = "planning"
    RESERVING = "reserving"
    SENDING = "sending"
    FREEZING = "freezing"
    GROWING = "growing"
    """Frozen, and larger than the room asked for: asking for more."""
    COMMITTING = "committing"
    ASKING = "asking"
    """Commit was sent and its answer lost: what became of the leg?"""
    REVOKING = "revoking"
    """The destination has not seen the Commit: cancelling the leg before it does."""
    THAWING = "thawing"
    CANCELLING = "cancelling"
    MOVED = "moved"
    STAYED = "stayed"
    LOST = "lost"


SOURCE_TERMINAL = frozenset({SourceState.MOVED, SourceState.STAYED, SourceState.LOST})

SOURCE_FROZEN = frozenset(
    {SourceState.GROWING, SourceState.COMMITTING, SourceState.ASKING, SourceState.REVOKING, SourceState.THAWING, SourceState.LOST}
)
"""The request is, or may be, out of its batch."""

SOURCE_BEFORE_COMMIT = frozenset(
    {
        SourceState.LOOKING,
        SourceState.PREPARING,
        SourceState.ANNOUNCING,
        SourceState.PLANNING,
        SourceState.RESERVING,
        SourceState.SENDING,
        SourceState.FREEZING,
        SourceState.GROWING,
    }
)
"""The destination cannot be the owner yet: the migration can be given up at once."""


class SourceEvent(StrEnum):
    """The result of an action, or ENDED."""

    MOVABLE = "movable"
    UNMOVABLE = "unmovable"
    PREPARED = "prepared"
    ANNOUNCED = "announced"
    MORE = "more"
    """A stage to copy while the request runs."""
    LAST = "last"
    """Time to freeze."""
    RESERVED = "reserved"
    SENT = "sent"
    FROZEN = "frozen"
    CROWDED = "crowded"
    """Frozen, but with more tokens than there is room for."""
    COMMITTED = "committed"
    REFUSED = "refused"
    """A Refusal to whatever was asked."""
    SILENT = "silent"
    """No answer: the message may or may not have arrived."""
    GONE = "gone"
    """The peer's process is dead: it owns nothing."""
    OWNER = "owner"
    HELD = "held"
    """The destination holds a reservation and has not seen the Commit."""
    FREE = "free"
    """The destination promises never to own the leg."""
    UNRESOLVED = "unresolved"
    """Asked for as long as allowed."""
    THAWED = "thawed"
    CANCELLED = "cancelled"
    TAKEN = "taken"
    """The cancel came too late: the destination is the owner."""
    ENDED = "ended"
    FAILED = "failed"
    """A deadline here, the channel, or an order to stop."""


class SourceAction(StrEnum):
    """What the source does on entering a state."""

    LOOK = "look"
    PREPARE = "prepare"
    ANNOUNCE = "announce"
    PLAN = "plan"
    RESERVE = "reserve"
    SEND = "send"
    FREEZE = "freeze"
    GROW = "grow"
    COMMIT = "commit"
    ASK = "ask"
    REVOKE = "revoke"
    THAW = "thaw"
    CANCEL = "cancel"
    """Tell the client's side and the destination that nothing comes of it."""
    HAND_OVER = "hand_over"
    """Tell the client's side that it has moved."""
    GIVE_UP = "give_up"
    STOP = "stop"


_S, _E, _A = SourceState, SourceEvent, SourceAction

SOURCE_START = (_S.LOOKING, _A.LOOK)

SOURCE_TABLE: dict[tuple[SourceState, SourceEvent], tuple[SourceState, SourceAction]] = {
    (_S.LOOKING, _E.MOVABLE): (_S.PREPARING, _A.PREPARE),
    (_S.LOOKING, _E.UNMOVABLE): (_S.STAYED, _A.STOP),
    (_S.LOOKING, _E.ENDED): (_S.STAYED, _A.STOP),
    (_S.LOOKING, _E.FAILED): (_S.STAYED, _A.STOP),
    #
    (_S.PREPARING, _E.PREPARED): (_S.ANNOUNCING, _A.ANNOUNCE),
    (_S.PREPARING, _E.REFUSED): (_S.CANCELLING, _A.CANCEL),
    (_S.PREPARING, _E.SILENT): (_S.CANCELLING, _A.CANCEL),
    (_S.PREPARING, _E.GONE): (_S.CANCELLING, _A.CANCEL),
    (_S.PREPARING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.PREPARING, _E.FAILED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.ANNOUNCING, _E.ANNOUNCED): (_S.PLANNING, _A.PLAN),
    (_S.ANNOUNCING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.ANNOUNCING, _E.FAILED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.PLANNING, _E.MORE): (_S.RESERVING, _A.RESERVE),
    (_S.PLANNING, _E.LAST): (_S.FREEZING, _A.FREEZE),
    (_S.PLANNING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.PLANNING, _E.FAILED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.RESERVING, _E.RESERVED): (_S.SENDING, _A.SEND),
    (_S.RESERVING, _E.REFUSED): (_S.CANCELLING, _A.CANCEL),
    (_S.RESERVING, _E.SILENT): (_S.CANCELLING, _A.CANCEL),
    (_S.RESERVING, _E.GONE): (_S.CANCELLING, _A.CANCEL),
    (_S.RESERVING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.RESERVING, _E.FAILED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.SENDING, _E.SENT): (_S.PLANNING, _A.PLAN),
    (_S.SENDING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.SENDING, _E.FAILED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.FREEZING, _E.FROZEN): (_S.COMMITTING, _A.COMMIT),
    (_S.FREEZING, _E.CROWDED): (_S.GROWING, _A.GROW),
    (_S.FREEZING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.FREEZING, _E.FAILED): (_S.THAWING, _A.THAW),
    #
    (_S.GROWING, _E.RESERVED): (_S.COMMITTING, _A.COMMIT),
    (_S.GROWING, _E.REFUSED): (_S.THAWING, _A.THAW),
    (_S.GROWING, _E.SILENT): (_S.THAWING, _A.THAW),
    (_S.GROWING, _E.GONE): (_S.THAWING, _A.THAW),
    (_S.GROWING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    (_S.GROWING, _E.FAILED): (_S.THAWING, _A.THAW),
    #
    (_S.COMMITTING, _E.COMMITTED): (_S.MOVED, _A.HAND_OVER),
    (_S.COMMITTING, _E.REFUSED): (_S.THAWING, _A.THAW),
    (_S.COMMITTING, _E.GONE): (_S.THAWING, _A.THAW),
    (_S.COMMITTING, _E.SILENT): (_S.ASKING, _A.ASK),
    (_S.COMMITTING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.ASKING, _E.OWNER): (_S.MOVED, _A.HAND_OVER),
    (_S.ASKING, _E.HELD): (_S.REVOKING, _A.REVOKE),
    (_S.ASKING, _E.FREE): (_S.THAWING, _A.THAW),
    (_S.ASKING, _E.GONE): (_S.THAWING, _A.THAW),
    (_S.ASKING, _E.SILENT): (_S.ASKING, _A.ASK),
    (_S.ASKING, _E.UNRESOLVED): (_S.LOST, _A.GIVE_UP),
    (_S.ASKING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.REVOKING, _E.CANCELLED): (_S.THAWING, _A.THAW),
    (_S.REVOKING, _E.TAKEN): (_S.MOVED, _A.HAND_OVER),
    (_S.REVOKING, _E.GONE): (_S.THAWING, _A.THAW),
    (_S.REVOKING, _E.SILENT): (_S.ASKING, _A.ASK),
    (_S.REVOKING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.THAWING, _E.THAWED): (_S.CANCELLING, _A.CANCEL),
    (_S.THAWING, _E.FAILED): (_S.LOST, _A.GIVE_UP),  # frozen for ever is worse than resumed elsewhere
    (_S.THAWING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
    #
    (_S.CANCELLING, _E.CANCELLED): (_S.STAYED, _A.STOP),
    (_S.CANCELLING, _E.TAKEN): (_S.STAYED, _A.STOP),  # only after ENDED: the client has left both sides, and so has the new owner's
    (_S.CANCELLING, _E.SILENT): (_S.STAYED, _A.STOP),  # what is held there expires
    (_S.CANCELLING, _E.GONE): (_S.STAYED, _A.STOP),
    (_S.CANCELLING, _E.ENDED): (_S.CANCELLING, _A.CANCEL),
}

RESULT_OF: dict[SourceEvent, MigrationResult] = {
    _E.UNMOVABLE: MigrationResult.UNMOVABLE,
    _E.REFUSED: MigrationResult.REFUSED,
    _E.ENDED: MigrationResult.ENDED,
    _E.FAILED: MigrationResult.FAILED,
    _E.SILENT: MigrationResult.FAILED,
    _E.GONE: MigrationResult.FAILED,
}
"""How a migration that stays is called: by the first of these events that it met."""


class DestinationState(StrEnum):
    """Where a leg stands at the destination."""

    NEW = "new"
    PREPARING = "preparing"
    RESERVED = "reserved"
    RESERVING = "reserving"
    COMMITTING = "committing"
    OWNER = "owner"
    DROPPED = "dropped"


class DestinationEvent(StrEnum):
    """A message, the result of an action, or something that befell the leg."""

    PREPARE = "prepare"
    RESERVE = "reserve"
    COMMIT = "commit"
    CANCEL = "cancel"
    QUERY = "query"
    REPEATED = "repeated"
    """A Prepare, Reserve or Commit that was answered before."""
    DONE = "done"
    """The action succeeded."""
    DENIED = "denied"
    """The action failed, for whatever reason."""
    EXPIRED = "expired"
    """The source has been silent for too long."""
    ENDED = "ended"
    """The arriving request's handling here is over."""


class DestinationAction(StrEnum):
    """What the destination does."""

    ADMIT = "admit"
    GROW = "grow"
    """Hold more memory and post a receive."""
    ACTIVATE = "activate"
    RELEASE = "release"
    """Stop what is going on for the leg and free what it holds; then answer, if there was a message."""
    ANSWER = "answer"
    """Say how things stand (Prepared, Reserved, Committed, Cancelled, StateIs)."""
    REPEAT = "repeat"
    """The answer given before."""
    JOIN = "join"
    """Wait for the action in progress, then look at the table again."""
    REFUSE = "refuse"
    """The Refusal given before, or one that says why."""
    NOTHING = "nothing"


_D, _V, _R = DestinationState, DestinationEvent, DestinationAction

DESTINATION_TABLE: dict[tuple[DestinationState, DestinationEvent], tuple[DestinationState, DestinationAction]] = {
    (_D.NEW, _V.PREPARE): (_D.PREPARING, _R.ADMIT),
    (_D.NEW, _V.RESERVE): (_D.DROPPED, _R.REFUSE),
    (_D.NEW, _V.COMMIT): (_D.DROPPED, _R.REFUSE),
    (_D.NEW, _V.CANCEL): (_D.DROPPED, _R.ANSWER),
    (_D.NEW, _V.QUERY): (_D.DROPPED, _R.ANSWER),  # an answer is a promise: a Prepare still under way comes too late
    #
    (_D.PREPARING, _V.PREPARE): (_D.PREPARING, _R.JOIN),
    (_D.PREPARING, _V.RESERVE): (_D.PREPARING, _R.REFUSE),
    (_D.PREPARING, _V.COMMIT): (_D.PREPARING, _R.REFUSE),
    (_D.PREPARING, _V.CANCEL): (_D.DROPPED, _R.RELEASE),
    (_D.PREPARING, _V.QUERY): (_D.PREPARING, _R.ANSWER),
    (_D.PREPARING, _V.DONE): (_D.RESERVED, _R.ANSWER),
    (_D.PREPARING, _V.DENIED): (_D.DROPPED, _R.RELEASE),
    (_D.PREPARING, _V.ENDED): (_D.DROPPED, _R.RELEASE),
    #
    (_D.RESERVED, _V.REPEATED): (_D.RESERVED, _R.REPEAT),
    (_D.RESERVED, _V.RESERVE): (_D.RESERVING, _R.GROW),
    (_D.RESERVED, _V.COMMIT): (_D.COMMITTING, _R.ACTIVATE),
    (_D.RESERVED, _V.CANCEL): (_D.DROPPED, _R.RELEASE),
    (_D.RESERVED, _V.QUERY): (_D.RESERVED, _R.ANSWER),
    (_D.RESERVED, _V.EXPIRED): (_D.DROPPED, _R.RELEASE),
    (_D.RESERVED, _V.ENDED): (_D.DROPPED, _R.RELEASE),
    #
    (_D.RESERVING, _V.REPEATED): (_D.RESERVING, _R.REPEAT),
    (_D.RESERVING, _V.RESERVE): (_D.RESERVING, _R.JOIN),
    (_D.RESERVING, _V.COMMIT): (_D.RESERVING, _R.JOIN),
    (_D.RESERVING, _V.CANCEL): (_D.DROPPED, _R.RELEASE),
    (_D.RESERVING, _V.QUERY): (_D.RESERVING, _R.ANSWER),
    (_D.RESERVING, _V.DONE): (_D.RESERVED, _R.ANSWER),
    (_D.RESERVING, _V.DENIED): (_D.DROPPED, _R.RELEASE),
    (_D.RESERVING, _V.ENDED): (_D.DROPPED, _R.RELEASE),
    #
    (_D.COMMITTING, _V.REPEATED): (_D.COMMITTING, _R.REPEAT),
    (_D.COMMITTING, _V.RESERVE): (_D.COMMITTING, _R.REFUSE),
    (_D.COMMITTING, _V.COMMIT): (_D.COMMITTING, _R.JOIN),
    (_D.COMMITTING, _V.CANCEL): (_D.COMMITTING, _R.JOIN),  # never undone half-way: the answer says which way it went
    (_D.COMMITTING, _V.QUERY): (_D.COMMITTING, _R.JOIN),
    (_D.COMMITTING, _V.DONE): (_D.OWNER, _R.ANSWER),
    (_D.COMMITTING, _V.DENIED): (_D.DROPPED, _R.RELEASE),
    (_D.COMMITTING, _V.ENDED): (_D.DROPPED, _R.RELEASE),
    #
    (_D.OWNER, _V.REPEATED): (_D.OWNER, _R.REPEAT),
    (_D.OWNER, _V.RESERVE): (_D.OWNER, _R.REFUSE),
    (_D.OWNER, _V.CANCEL): (_D.OWNER, _R.ANSWER),
    (_D.OWNER, _V.QUERY): (_D.OWNER, _R.ANSWER),
    (_D.OWNER, _V.ENDED): (_D.OWNER, _R.NOTHING),  # remembered, so that a late question is answered truly
    #
    (_D.DROPPED, _V.REPEATED): (_D.DROPPED, _R.REFUSE),
    (_D.DROPPED, _V.PREPARE): (_D.DROPPED, _R.REFUSE),
    (_D.DROPPED, _V.RESERVE): (_D.DROPPED, _R.REFUSE),
    (_D.DROPPED, _V.COMMIT): (_D.DROPPED, _R.REFUSE),
    (_D.DROPPED, _V.CANCEL): (_D.DROPPED, _R.ANSWER),
    (_D.DROPPED, _V.QUERY): (_D.DROPPED, _R.ANSWER),
    (_D.DROPPED, _V.ENDED): (_D.DROPPED, _R.NOTHING),
}


def source_step(state: SourceState, event: SourceEvent) -> tuple[SourceState, SourceAction]:
    """Raises ProtocolError for what the table does not hold."""
    step = SOURCE_TABLE.get((state, event))
    if step is None:
        raise ProtocolError(f"the source is {state}: {event} is not possible there")
    return step


def destination_step(state: DestinationState, event: DestinationEvent) -> tuple[DestinationState, DestinationAction]:
    """Raises ProtocolError for what the table does not hold."""
    step = DESTINATION_TABLE.get((state, event))
    if step is None:
        raise ProtocolError(f"the destination is {state}: {event} is not possible there")
    return step
