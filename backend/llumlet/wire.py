"""PURE. The bytes between a backend and a gateway: cursors, control events, and the cutting of an engine's SSE bytes into events.

docs/wire.md is the contract. Bytes of the engine are never decoded: a cursor line goes in front of each event, nothing else changes.
"""

import base64
import json
import re
from collections.abc import Iterable, Sequence

HeaderPairs = Sequence[tuple[bytes, bytes]]

EVENT_STREAM = b"text/event-stream"
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_CREATED = re.compile(rb'"created(?:_at)?":\s*(\d+)')


class EventSplitter:
    """Cuts a byte stream into whole SSE events, each with its terminating blank line. Keeps an unfinished event for the next push."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The events completed by these bytes."""
        if not self._rest and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            return [data]  # one whole event: nearly always
        scan = max(0, len(self._rest) - 3)
        text = self._rest + data
        events = []
        start = 0
        while found := _BLANK_LINE.search(text, max(scan, start)):
            if found.end() == len(text) and text.endswith(b"\r"):
                break  # its "\n" may be still to come
            events.append(text[start : found.end()])
            start = found.end()
        self._rest = text[start:]
        return events

    def flush(self) -> bytes:
        """What is left at the end of the stream, unfinished."""
        rest, self._rest = self._rest, b""
        return rest


class EventStamper:
    """Puts a cursor line in front of events: `id: TOKENS.SUB;IDS`, SUB counting the events at the same number of tokens from 0."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of the last cursor written."""
        self._sub = -1

    def stamp(self, events: Iterable[bytes], ids: Sequence[int]) -> bytes:
        """These events, which bring the tokens `ids`. Comments get no cursor; alone, they take no tokens either."""
        events = list(events)
        if all(is_comment(event) for event in events):
            return b"".join(events)
        if ids:
            self.tokens += len(ids)
            self._sub = -1
        out = []
        for event in events:
            if not is_comment(event):
                self._sub += 1
                out.append(cursor_line(self.tokens, self._sub, ids))
                ids = ()
            out.append(event)
        return b"".join(out)


def is_comment(event: bytes) -> bool:
    """Whether a block holds nothing that an SSE client would dispatch."""
    return event[:1] in b":\r\n" and all(line[:1] in (b"", b":") for line in _LINE_END.split(event))


def cursor_line(tokens: int, sub: int, ids: Sequence[int]) -> bytes:
    """One cursor, with its newline."""
    return b"id: %d.%d;%s\n" % (tokens, sub, ",".join(map(str, ids)).encode())


def progress_events(tokens: int, ids: Sequence[int]) -> bytes:
    """Progress of a request that streams nothing: an event for each of `ids`, which follow the first `tokens` ones.

    One a token, so that a gateway which goes on elsewhere finds a cursor at every place where it may have stopped.
    """
    return b"".join(cursor_line(tokens + index, 0, (token,)) + b"\n" for index, token in enumerate(ids, start=1))


def find_created(data: bytes) -> int | None:
    """The first `"created":N` or `"created_at":N` of an event or a JSON body. Inside a string its quotes were escaped: no text matches."""
    found = _CREATED.search(data)
    return int(found[1]) if found else None


def replace_created(data: bytes, made: int, shown: int) -> bytes:
    """The same bytes with the first `"created":made` (or `created_at`) saying `shown`; any other value there is left alone."""
    found = _CREATED.search(data)
    if found is None or int(found[1]) != made:
        return data
    return data[: found.start(1)] + b"%d" % shown + data[found.end(1) :]


def moving_event(epoch: int, instance: str, url: str) -> bytes:
    return _control({"kind": "moving", "epoch": epoch, "instance": instance, "url": url})


def kept_event(epoch: int) -> bytes:
    return _control({"kind": "kept", "epoch": epoch})


def moved_event(epoch: int) -> bytes:
    return _control({"kind": "moved", "epoch": epoch})


def lost_event(reason: str) -> bytes:
    return _control({"kind": "lost", "reason": reason})


def released_event(reason: str) -> bytes:
    return _control({"kind": "released", "reason": reason})


def preempted_event() -> bytes:
    return _control({"kind": "preempted"})


def head_event(status: int, headers: HeaderPairs) -> bytes:
    return _control({"kind": "head", "status": status, "headers": _text_pairs(headers)})


def answer_event(status: int, headers: HeaderPairs, body: bytes) -> bytes:
    """A whole answer that is not an event stream."""
    answer = {"status": status, "headers": _text_pairs(headers), "body": base64.b64encode(body).decode()}
    return b"event: midstream.answer\ndata: %s\n\n" % _json(answer)


def error_body(message: str, kind: str, code: str | None) -> bytes:
    """An error in OpenAI's shape."""
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _control(fields: dict[str, object]) -> bytes:
    return b"event: midstream\ndata: %s\n\n" % _json(fields)


def _text_pairs(headers: HeaderPairs) -> list[list[str]]:
    return [[name.decode("latin-1").lower(), value.decode("latin-1")] for name, value in headers]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
