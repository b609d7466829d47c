"""PURE. What one client has been shown so far: the token ids, the last cursor, and whether the answer is complete.

When a stream goes on at another instance, that one tells everything from the beginning. The transcript judges its events:

    cursor <= last shown                                     OLD    drop it
    same tokens, next sub                                    NEW
    more tokens, sub 0, and its ids begin where we ended     NEW    show it
    anything else                                            GAP    something is missing: not to be shown

A client that comes from another gateway may have seen more or less than the ids that were kept there: ids that are held are never
taken in twice, and those that only the client has seen are taken in as they are told again.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from enum import Enum, auto

from gateway.control import CONTROL_TYPE
from gateway.sse import CURSOR, END_MARK, Cursor, Event, cursor_of

_CREATED = re.compile(rb'"created(?:_at)?":\s*(\d+)')


class Verdict(Enum):
    """Whether an event goes to the client."""

    NEW = auto()
    OLD = auto()
    GAP = auto()


Mark = Callable[[Event, "Transcript"], bytes]
"""An event that was noted, as the client gets it."""


class Transcript:
    """Owned by one relay. Strict where two streams meet; on a stream already joined every event is new by construction.

    `last_events` are the types of event that end such a stream; none: the end mark does.
    """

    def __init__(self, last_events: frozenset[bytes] = frozenset()) -> None:
        self._last_events = last_events
        self._signs = (b"\r", CONTROL_TYPE, *(last_events or (END_MARK,)))
        self._ids = array("I")
        self.created: int | None = None
        """The second of creation that the client was shown, if any."""
        self.forgotten = False
        """The ids are remembered no longer."""
        self.complete = False
        """The answer has been seen to its end."""
        self.contiguous = True
        """False if a cursor's ids did not add up: then the ids are no basis for going on elsewhere."""
        self._last = (0, -1)
        self._joining = False

    @staticmethod
    def come_from_elsewhere(
        ids: Sequence[int], tokens: int, sub: int, created: int | None, last_events: frozenset[bytes] = frozenset()
    ) -> "Transcript":
        """Of a client that has seen the event `tokens`.`sub` (0.-1: none) at another gateway, where these first ids were kept."""
        transcript = Transcript(last_events)
        transcript._ids.extend(ids)
        transcript._last = (tokens, sub)
        transcript.created = created
        transcript.rejoin()
        return transcript

    @property
    def tokens(self) -> int:
        """Output tokens the client has seen."""
        return self._last[0]

    @property
    def token_ids(self) -> list[int]:
        """All output tokens shown so far, in order; none once they are forgotten."""
        return self._ids.tolist()

    def ids_between(self, first: int, last: int) -> Sequence[int]:
        """Those of them from number `first` up to, not including, `last`."""
        return self._ids[first:last].tolist()

    @property
    def remembered(self) -> int:
        """How many token ids are held."""
        return len(self._ids)

    def forget(self) -> None:
        """Hold no ids from now on."""
        self.forgotten = True
        self._ids = array("I")

    def rejoin(self) -> None:
        """The next events come from another instance, from the beginning."""
        self._joining = True

    @property
    def joining(self) -> bool:
        """Still waiting for the first new event after `rejoin`."""
        return self._joining

    def judge(self, event: Event) -> Verdict:
        """Look at the client's next event and note it if it is new."""
        cursor = event.cursor
        if cursor is None:
            return self._judge_without_cursor(event)
        if self._joining:
            verdict = self._compare(cursor)
            if verdict is not Verdict.NEW:
                if verdict is Verdict.OLD:
                    self._remember(cursor)
                    self.complete = self._is_last(event)
                return verdict
            self._joining = False
            self._remember(cursor)
        else:
            self._go_on(cursor)
        if self.created is None and (found := _CREATED.search(event.raw)):
            self.created = int(found[1])
        self._last = (cursor.tokens, cursor.sub)
        self.complete = self.complete or self._is_last(event)
        return Verdict.NEW

    def pass_on(self, data: bytes, mark: Mark | None = None) -> tuple[bytes, int] | None:
        """The quick way for what most reads bring: whole events in lines that end with LF, none of them an instance's or the last.

        They are noted; answers what the client gets of them, and how many have brought tokens. None if they may be anything else: then
        nothing is noted. `mark` changes what a client gets of an event that has a cursor.
        """
        if self._joining or data[-2:] != b"\n\n":
            return None
        for sign in self._signs:
            if sign in data:
                return None
        if data[:3] == b"id:":
            return self._pass_cursors(data, mark)
        if self.contiguous or b"\nid:" in data or b"\n\n\n" in data or data[:1] == b"\n":
            return None
        return data, 0

    def _pass_cursors(self, data: bytes, mark: Mark | None) -> tuple[bytes, int] | None:
        if self.created is None and b'"created' in data:
            return None
        events, shown, at = [], [], 0
        while at < len(data):
            end = data.find(b"\n\n", at) + 2
            match = CURSOR.match(data, at, end)
            if match is None:
                return None
            events.append((cursor_of(match), data[match.end() : end]))
            at = end
        brought = 0
        for cursor, raw in events:
            brought += cursor.tokens > self._last[0]
            self._go_on(cursor)
            self._last = cursor[:2]
            if raw != b"\n":
                shown.append(mark(Event(cursor, raw), self) if mark else raw)
        return shown[0] if len(shown) == 1 else b"".join(shown), brought

    def _go_on(self, cursor: Cursor) -> None:
        """Every event of a stream that is joined is new."""
        if cursor.tokens != self._last[0] + len(cursor.ids):
            self.contiguous = False
        self._remember(cursor)

    def fresh(self) -> "Transcript":
        """An empty one for a stream of the same kind."""
        return Transcript(self._last_events)

    def _is_last(self, event: Event) -> bool:
        return event.type in self._last_events if self._last_events else event.is_done

    def _remember(self, cursor: Cursor) -> None:
        """Those of its ids that are not held yet."""
        if not self.forgotten and cursor.ids:
            held = len(self._ids) - (cursor.tokens - len(cursor.ids))
            try:
                self._ids.extend(cursor.ids[max(0, held) :])
            except OverflowError:
                self.contiguous = False

    def _judge_without_cursor(self, event: Event) -> Verdict:
        if self._joining:
            return Verdict.OLD if event.is_comment or event.is_blank else Verdict.GAP
        self.complete = self.complete or self._is_last(event)
        self.contiguous = self.contiguous and (event.is_comment or event.is_blank)
        return Verdict.NEW

    def _compare(self, cursor: Cursor) -> Verdict:
        tokens, sub = self._last
        if (cursor.tokens, cursor.sub) <= self._last:
            return Verdict.OLD
        if cursor.tokens == tokens:
            return Verdict.NEW if cursor.sub == sub + 1 and not cursor.ids else Verdict.GAP
        begins_at = cursor.tokens - len(cursor.ids)
        return Verdict.NEW if cursor.sub == 0 and begins_at == tokens else Verdict.GAP
