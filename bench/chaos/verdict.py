"""PURE. What a client got, compared with what it must be."""

import json
import re
from dataclasses import dataclass
from enum import Enum

_KEEP_ALIVE = b": keep-alive\n\n"
_IDS = re.compile(rb"^id:[^\n]*\n", re.MULTILINE)
_CREATED = re.compile(rb'"created": ?\d+')
_TOOL = re.compile(rb"chatcmpl-tool-[0-9a-f]+")
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Got:
    """An answer as far as it came. Mutable: its reader adds to it."""

    request: str
    stream: bool
    status: int = 0
    body: bytes = b""
    ended: bool = False
    """In good order, as HTTP goes."""
    reader_failed: str = ""
    """How the connection broke, if it did."""
    gateway_gone: bool = False
    """The gateway it was read from was killed, stopped or hung meanwhile."""
    gave_up: bool = False
    """Its reader did not want to wait any longer."""


class Verdict(Enum):
    """What is to be counted."""

    RIGHT = "right"
    WRONG = "wrong"
    """It is not the right answer, nor the beginning of it."""
    LOST = "lost"
    """It could not be finished, and says so; or nobody was left to say so; or it did not end in the time a client waits."""
    TRUNCATED = "truncated"
    """It ends too early, as if that were its end."""


def comparable(body: bytes, request: str) -> bytes:
    """Without what differs between any two runs: the request's id, the second it was made, comments and cursors."""
    same = _IDS.sub(b"", body.replace(request.encode(), b"R").replace(_KEEP_ALIVE, b""))
    return _TOOL.sub(b"chatcmpl-tool-x", _CREATED.sub(b'"created":0', same))


def judge(got: Got, expected: bytes) -> Verdict:
    """`expected` is comparable; of an answer that is no stream only the whole is right."""
    seen = comparable(got.body, got.request)
    if got.ended and got.status == 200 and seen == expected:
        return Verdict.RIGHT
    if got.ended and got.status >= 400:
        return Verdict.LOST if _is_error(got.body) else Verdict.WRONG
    if not got.stream:
        return _unfinished(got) if expected.startswith(seen) else Verdict.WRONG
    shown, is_honest = _without_error(seen)
    if not expected.startswith(shown):
        return Verdict.WRONG
    return Verdict.LOST if is_honest else _unfinished(got)


def _unfinished(got: Got) -> Verdict:
    return Verdict.LOST if not got.ended and (got.gateway_gone or got.gave_up) else Verdict.TRUNCATED


def _without_error(seen: bytes) -> tuple[bytes, bool]:
    """What comes before an honest end (an error event and the end mark), and whether there is one."""
    if not seen.endswith(DONE):
        return seen, False
    before, _, last = seen.removesuffix(DONE).removesuffix(b"\n\n").rpartition(b"\n\n")
    if last.startswith(b"data: ") and _is_error(last.removeprefix(b"data: ")):
        return before + b"\n\n" if before else b"", True
    return seen, False


def _is_error(raw: bytes) -> bool:
    """In OpenAI's shape."""
    try:
        return bool({"message", "type", "param", "code"} <= json.loads(raw)["error"].keys())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
