"""PURE. What a client got, compared with what it must be."""

import json
import re
from dataclasses import dataclass
from enum import Enum

_KEEP_ALIVE = b": keep-alive\n\n"
_IDS = re.compile(rb"^id:[^\n]*\n", re.MULTILINE)
_CREATED = re.compile(rb'"created(_at)?": ?\d+')
_NAME = re.compile(rb"(chatcmpl-tool-|(?:resp|msg)_)[0-9a-f]{16}")
_CACHED = re.compile(rb'"(cached_tokens|cache_write_tokens)": ?\d+')
_ERROR = b"event: error\ndata: "
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
    """Without what differs between any two runs: the request's id, the second it was made, what was in a cache, comments and cursors; for
    each name that was drawn stands its number."""
    same = _IDS.sub(b"", body.replace(request.encode(), b"R").replace(_KEEP_ALIVE, b""))
    names: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        return names.setdefault(found[0], b"%s%d" % (found[1], len(names)))

    return _NAME.sub(number, _CACHED.sub(b'"cached":0', _CREATED.sub(b'"created":0', same)))


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
    """What comes before an honest end (an error event, with the end mark where the API has one), and whether there is one."""
    before, _, last = seen.removesuffix(DONE).removesuffix(b"\n\n").rpartition(b"\n\n")
    begins = b"data: " if seen.endswith(DONE) else _ERROR
    if last.startswith(begins) and _is_error(last.removeprefix(begins)):
        return before + b"\n\n" if before else b"", True
    return seen, False


def _is_error(raw: bytes) -> bool:
    """In OpenAI's shape, which Anthropic's has too; or as an event of the responses API."""
    try:
        told = json.loads(raw)
        return bool({"message", "type", "param", "code"} <= told.get("error", told).keys())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
