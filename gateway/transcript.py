"""PURE. What one client has been shown so far: the token ids, the last cursor, and whether the answer is complete.

When a stream goes on at another instance, that one tells everything from the beginning. The transcript judges its events:

    cursor <= last shown                                     OLD    drop it
    same tokens, next sub                                    NEW
    more tokens, sub 0, and its ids begin where we ended     NEW    show it
    anything else                                            GAP    something is missing: not to be shown
"""

from enum import Enum, auto

from gateway.sse import Cursor, Event


class Verdict(Enum):
    """Whether an event goes to the client."""

    NEW = auto()
    OLD = auto()
    GAP = auto()


class Transcript:
    """Owned by one relay. Strict where two streams meet; on a stream already joined every event is new by construction."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """All output tokens shown so far, in order."""
        self.complete = False
        """The answer has been seen to its end."""
        self.contiguous = True
        """False if a cursor's ids did not add up: then the ids are no basis for going on elsewhere."""
        self._last = (0, -1)
        self._joining = False

    @property
    def tokens(self) -> int:
        """Output tokens the client has seen."""
        return self._last[0]

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
                return verdict
            self._joining = False
        elif cursor.tokens != len(self.token_ids) + len(cursor.ids):
            self.contiguous = False
        self.token_ids.extend(cursor.ids)
        self._last = (cursor.tokens, cursor.sub)
        self.complete = self.complete or event.is_done
        return Verdict.NEW

    def _judge_without_cursor(self, event: Event) -> Verdict:
        if self._joining:
            return Verdict.OLD if event.is_comment or event.is_blank else Verdict.GAP
        self.complete = self.complete or event.is_done
        return Verdict.NEW

    def _compare(self, cursor: Cursor) -> Verdict:
        tokens, sub = self._last
        if (cursor.tokens, cursor.sub) <= self._last:
            return Verdict.OLD
        if cursor.tokens == tokens:
            return Verdict.NEW if cursor.sub == sub + 1 and not cursor.ids else Verdict.GAP
        begins_at = cursor.tokens - len(cursor.ids)
        return Verdict.NEW if cursor.sub == 0 and begins_at == tokens else Verdict.GAP
