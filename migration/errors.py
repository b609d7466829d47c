"""The error tree of the migration package.

MigrationError
├── RequestEnded        the request finished or its client left: a normal event, not a fault
├── Unmovable           the request cannot be moved exactly; `reason` is counted
├── Refused             the destination will not take it; `reason` is counted
├── LinkError           a message got no answer: who knows whether it arrived
│   └── PeerGone        the peer's process is certainly not there (connection refused)
├── ChannelError        KV bytes could not be carried
│   ├── ChannelTimeout
│   └── ChannelUnknown  the peer does not know this incarnation of the channel: open a new one
└── ProtocolError       a message that the protocol does not allow here
"""


class MigrationError(Exception):
    """Base of everything the migration package raises. `reason` is a short snake_case word, fit for a metric label."""

    reason = "migration_error"

    def __init__(self, message: str = "", *, reason: str | None = None) -> None:
        super().__init__(message or reason or self.reason)
        if reason is not None:
            self.reason = reason


class RequestEnded(MigrationError):
    """The request finished, was aborted, or its client left."""

    reason = "request_ended"


class Unmovable(MigrationError):
    """This request cannot be carried exactly; it stays and is served."""

    reason = "unmovable"


class Refused(MigrationError):
    """The destination does not take the request."""

    reason = "refused"


class LinkError(MigrationError):
    """No answer to a message within its deadline; it may or may not have arrived."""

    reason = "link"


class PeerGone(LinkError):
    """Nobody listens at the peer's address any more: its process is dead."""

    reason = "peer_gone"


class ChannelError(MigrationError):
    """KV blocks could not be sent or received."""

    reason = "channel"


class ChannelTimeout(ChannelError):
    """A transfer was not over within its deadline."""

    reason = "channel_timeout"


class ChannelUnknown(ChannelError):
    """The other side has no such channel (it was restarted, or dropped it)."""

    reason = "channel_unknown"


class ProtocolError(MigrationError):
    """A message or event that the protocol does not allow in this state."""

    reason = "protocol"
