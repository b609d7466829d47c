"""PURE. What a backend says to the gateway inside a stream: control events, and the answer of a request that does not stream."""

import base64
import binascii
import json
from dataclasses import dataclass

from gateway.sse import Event
from migration.leg import InstanceId

CONTROL_TYPE = b"midstream"
ANSWER_TYPE = b"midstream.answer"


class ControlError(ValueError):
    """A control event that cannot be understood."""


@dataclass(frozen=True, slots=True)
class Moving:
    """The request is about to move to that instance: attach now."""

    epoch: int
    instance: InstanceId
    url: str


@dataclass(frozen=True, slots=True)
class Kept:
    """It stays after all."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Moved:
    """It has moved; nothing more comes here."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The sender does not know what became of the request; nothing more comes here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """The sender has let the request go, unfinished, and holds nothing of it: go on elsewhere."""

    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request has lost its memory there and waits for it again: who can go on with it elsewhere may close the stream."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the answer, at the start of an attachment."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to a request with `stream: false`."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


Control = Moving | Kept | Moved | Lost | Released | Preempted | Head | Answer


def parse_control(event: Event) -> Control | None:
    """The control event in it; None for an event that is the client's. Raises ControlError."""
    kind = event.type
    if kind not in (CONTROL_TYPE, ANSWER_TYPE):
        return None
    try:
        raw = json.loads(event.field(b"data"))
        if kind == ANSWER_TYPE:
            return Answer(int(raw["status"]), _headers(raw["headers"]), base64.b64decode(raw["body"], validate=True))
        return _control(raw)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ControlError(f"malformed control event: {error}") from error


def _control(raw: dict[str, object]) -> Control:
    match raw:
        case {"kind": "moving", "epoch": int(epoch), "instance": str(instance), "url": str(url)}:
            return Moving(epoch, InstanceId(instance), url)
        case {"kind": "kept", "epoch": int(epoch)}:
            return Kept(epoch)
        case {"kind": "moved", "epoch": int(epoch)}:
            return Moved(epoch)
        case {"kind": "lost"}:
            return Lost(str(raw.get("reason", "")))
        case {"kind": "released"}:
            return Released(str(raw.get("reason", "")))
        case {"kind": "preempted"}:
            return Preempted()
        case {"kind": "head", "status": int(status), "headers": headers}:
            return Head(status, _headers(headers))
    raise ValueError(f"unknown kind or missing fields: {raw!r:.200}")


def _headers(raw: object) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(raw, list):
        raise TypeError("headers are not a list")
    return tuple((str(name).lower().encode("latin-1"), str(value).encode("latin-1")) for name, value in raw)
