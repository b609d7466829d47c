"""PURE. Messages and answers to and from JSON-able objects, `{"kind": "prepare", ...}`. Strict: anything else is a ProtocolError."""

from typing import TypeVar

from migration.errors import ProtocolError
from migration.messages import (
    Answer,
    Cancel,
    Cancelled,
    Commit,
    Committed,
    Message,
    Prepare,
    Prepared,
    Query,
    Refusal,
    Reserve,
    Reserved,
    StateIs,
)
from migration.typed_json import decode, encode

T = TypeVar("T")

_MESSAGES: dict[str, type[Message]] = {"prepare": Prepare, "reserve": Reserve, "commit": Commit, "cancel": Cancel, "query": Query}
_ANSWERS: dict[str, type[Answer]] = {
    "prepared": Prepared,
    "reserved": Reserved,
    "committed": Committed,
    "cancelled": Cancelled,
    "state_is": StateIs,
    "refusal": Refusal,
}
_KINDS: dict[type, str] = {kind: name for name, kind in [*_MESSAGES.items(), *_ANSWERS.items()]}


def to_json(said: Message | Answer) -> dict[str, object]:
    """Ready for json.dumps."""
    fields = encode(said)
    assert isinstance(fields, dict)
    return {"kind": _KINDS[type(said)], **fields}


def message_from_json(value: object) -> Message:
    """Raises ProtocolError."""
    return _from_json(_MESSAGES, value)


def answer_from_json(value: object) -> Answer:
    """Raises ProtocolError."""
    return _from_json(_ANSWERS, value)


def _from_json(kinds: dict[str, type[T]], value: object) -> T:
    if not isinstance(value, dict):
        raise ProtocolError(f"expected an object, got {type(value).__name__}")
    fields = dict(value)
    name = fields.pop("kind", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown kind {name!r}")
    try:
        return decode(kind, fields)
    except ValueError as error:
        raise ProtocolError(f"malformed {name}: {error}") from error
