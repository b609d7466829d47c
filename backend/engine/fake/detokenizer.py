"""PURE. From tokens to text, token by token: incremental UTF-8, stop strings, and holding back what may yet become one."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.fake.vocabulary import piece


@dataclass(frozen=True, slots=True)
class StopRule:
    """Which strings end the text, and whether they belong to it. They are not looked for in the first `min_tokens` tokens."""

    strings: Sequence[str] = ()
    include: bool = False
    min_tokens: int = 0


class Detokenizer:
    """The text of one answer. Characters that could be the start of a stop string stay back until the answer has ended."""

    def __init__(self, stop: StopRule) -> None:
        self._stop = stop
        self._held = 0 if stop.include else max((len(s) for s in stop.strings), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._taken = 0
        self._tokens = 0
        self._searched = 0

    def push(self, token: int) -> str | None:
        """Add a token; answers the stop string that has ended the text, if one has."""
        self._tokens += 1
        added = self._decoder.decode(piece(token))
        self._text += added
        if self._tokens <= self._stop.min_tokens:
            self._searched = len(self._text)
            return None
        if not added:
            return None
        found = [(at, s) for s in self._stop.strings if (at := self._text.find(s, max(0, self._searched - len(s) + 1))) >= 0]
        self._searched = len(self._text)
        if not found:
            return None
        at, string = min(found, key=lambda pair: pair[0])
        self._text = self._text[: at + len(string) if self._stop.include else at]
        return string

    def take(self, *, ended: bool) -> str:
        """The text since the last call that can be shown."""
        end = len(self._text) if ended else max(self._taken, len(self._text) - self._held)
        shown, self._taken = self._text[self._taken : end], end
        return shown
