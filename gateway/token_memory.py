"""The token ids that a gateway remembers of its streams, so that they can go on elsewhere: bounded for each, and in all."""

from prometheus_client import Gauge

from gateway.transcript import Transcript

LOT_TOKENS = 32
"""A stream that grows counts so many at a time."""

SHOWN_TOKENS = 256
"""The gauge is at most so many behind: setting it for each token would cost more than counting it."""


class TokenMemory:
    """Counts ids, four bytes each. Owned by the app; each relay takes a share."""

    def __init__(self, max_tokens: int, max_request_tokens: int, gauge: Gauge) -> None:
        self._max_tokens = max_tokens
        self._max_request_tokens = max_request_tokens
        self.tokens = 0
        """Remembered now, over all requests."""
        self._gauge = gauge
        self._shown = 0

    def share(self) -> "TokenShare":
        return TokenShare(self)

    def change(self, share_tokens: int, by: int) -> bool:
        """Whether a share may grow to that size, by so many; then it is counted. It may always shrink."""
        if by > 0 and (share_tokens > self._max_request_tokens or self.tokens + by > self._max_tokens):
            return False
        self.tokens += by
        if self.tokens != self._shown and (self.tokens == 0 or abs(self.tokens - self._shown) >= SHOWN_TOKENS):
            self._shown = self.tokens
            self._gauge.set(self._shown)
        return True


class TokenShare:
    """What one request takes of it. `cover(0)` gives all back."""

    def __init__(self, memory: TokenMemory) -> None:
        self._memory = memory
        self._tokens = 0

    def follow(self, transcript: Transcript) -> None:
        """Count what it remembers, in lots; where there is no room for that, it forgets."""
        remembered = transcript.remembered
        if remembered <= self._tokens:
            return
        if not (self.cover(-(-remembered // LOT_TOKENS) * LOT_TOKENS) or self.cover(remembered)):
            transcript.forget()
            self.cover(0)

    def cover(self, tokens: int) -> bool:
        """Count that many for this request from now on; False, with nothing changed, if there is no room for them."""
        if tokens == self._tokens:
            return True
        if not self._memory.change(tokens, tokens - self._tokens):
            return False
        self._tokens = tokens
        return True
