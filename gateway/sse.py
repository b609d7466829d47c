"""PURE. An incremental decoder of server-sent events that keeps their bytes: bytes in, whole events out, nothing re-encoded.

An event ends with an empty line; lines end with LF, CR LF or CR (the standard's rule). Our own cursor, if there is one, is the first
line of an event: `id: TOKENS.SUB;IDS`. It is taken off; every other byte is kept.
"""

import re
from typing import NamedTuple

END_MARK = b"[DONE]"

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
CURSOR = re.compile(rb"id: ?(\d{1,12})\.(\d{1,12});([\d,]*)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLong(ValueError):
    """An event grew over the decoder's limit."""


class Cursor(NamedTuple):
    """After this event the client has seen `tokens` output tokens; `sub` counts events at that number; `ids` are new since the last."""

    tokens: int
    sub: int
    ids: tuple[int, ...]


class Event(NamedTuple):
    """One event: its cursor, and its bytes as they came, without the cursor's line but with everything up to the empty line."""

    cursor: Cursor | None
    raw: bytes

    @property
    def is_blank(self) -> bool:
        """Nothing but line ends: a cursor with no data."""
        return len(self.raw) <= 4 and not self.raw.strip(b"\r\n")

    @property
    def is_comment(self) -> bool:
        """Only comment lines, such as a keep-alive."""
        return self.raw.startswith(b":") and all(not line or line.startswith(b":") for line in _LINE_END.split(self.raw))

    @property
    def is_done(self) -> bool:
        """The whole event is OpenAI's end mark. A text that merely contains "[DONE]" is not."""
        return len(self.raw) <= 20 and self.raw.strip(b"\r\n") in (b"data: " + END_MARK, b"data:" + END_MARK)

    def field(self, name: bytes) -> bytes:
        """The values of one field, joined by newlines as the standard says; empty if there is none."""
        values = []
        for line in _LINE_END.split(self.raw):
            key, colon, value = line.partition(b":")
            if key == name and colon:
                values.append(value.removeprefix(b" "))
        return b"\n".join(values)

    @property
    def type(self) -> bytes:
        """The event's type; empty for a plain one. Cheap for events that begin with `data:`, or with their type."""
        raw = self.raw
        if raw.startswith(b"data"):
            return b""
        if raw.startswith(b"event:") and raw.count(b"event") == 1 and b"\r" not in raw:
            return raw.partition(b"\n")[0].removeprefix(b"event:").removeprefix(b" ")
        return self.field(b"event")


class Decoder:
    """Turns the bytes of one response into events. Holds back, at most, one event that is not complete yet.

    Raises EventTooLong, at the next `feed`, when that one has grown over `max_event_bytes`: what came before it is not lost.
    With `strips_cursors=False` a line that looks like a cursor is an event's own, and kept.
    """

    def __init__(self, max_event_bytes: int, *, strips_cursors: bool = True) -> None:
        self._max_event_bytes = max_event_bytes
        self._event = _event if strips_cursors else _plain_event
        self._held = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        held = self._held
        if len(held) > self._max_event_bytes:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        text: bytes | bytearray = data
        if held:
            held += data
            text = held
        find_end = _find_end if b"\r" in text else _find_end_lf
        events = []
        begin = 0
        while (end := find_end(text, self._searched)) is not None:
            events.append(self._event(bytes(text[begin:end])))
            begin = self._searched = end
        if held:
            del held[:begin]
        else:
            self._held = held = bytearray(data[begin:])
        self._searched = max(0, len(held) - 3)
        return events

    @property
    def is_between_events(self) -> bool:
        """Nothing is held back."""
        return not self._held

    def finish(self) -> list[Event]:
        """The response is over. What is left is no event, as the standard says, unless it ends with a CR that could have been half of a
        CR LF, or is an end mark that lacks its empty line."""
        rest = _event(bytes(self._held))
        self._held.clear()
        self._searched = 0
        return [rest] if rest.is_done or _BLANK_LINE.search(rest.raw) else []

    def rest(self) -> bytes:
        """The response is over, and is to be passed on as it was: the bytes that make no whole event."""
        return bytes(self._held)


def _find_end_lf(text: bytes | bytearray, start: int) -> int | None:
    """Where the first event after `start` ends, in a text without CR."""
    at = text.find(b"\n\n", start)
    return at + 2 if at >= 0 else None


def _find_end(text: bytes | bytearray, start: int) -> int | None:
    """The same for any line ends. A CR at the very end may be half of a CR LF: wait for more."""
    match = _BLANK_LINE.search(text, start)
    if match is None or (match.end() == len(text) and text[-1:] == b"\r"):
        return None
    return match.end()


def _plain_event(raw: bytes) -> Event:
    return Event(None, raw)


def _event(raw: bytes) -> Event:
    match = CURSOR.match(raw) if raw.startswith(b"id:") else None
    return Event(cursor_of(match), raw[match.end() :]) if match else Event(None, raw)


def cursor_of(match: re.Match[bytes]) -> Cursor:
    """What a match of CURSOR says."""
    tokens, sub, ids = match.groups()
    each = (int(ids),) if ids.isdigit() else tuple([int(word) for word in ids.split(b",") if word])
    return Cursor(int(tokens), int(sub), each)
