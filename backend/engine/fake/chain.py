"""PURE. Digests of a growing row of tokens: one over all of them, and one name for each complete block's prefix."""

import struct
from hashlib import blake2b

_TOKEN = struct.Struct("<I")
_KEY_BYTES = 8


class TokenChain:
    """Grows by one token at a time."""

    __slots__ = ("_block_tokens", "_digest", "keys", "tokens")

    def __init__(self, block_tokens: int, keys: list[int]) -> None:
        self._block_tokens = block_tokens
        self._digest = blake2b(digest_size=16)
        self.tokens = 0
        self.keys = keys
        """One for each complete block: equal keys, equal tokens up to the end of that block. Appended to in place."""

    def push(self, token: int) -> None:
        """One more token."""
        self._digest.update(_TOKEN.pack(token))
        self.tokens += 1
        if self.tokens % self._block_tokens == 0:
            self.keys.append(int.from_bytes(self._digest.digest()[:_KEY_BYTES], "little"))

    def digest(self) -> bytes:
        """Of all tokens so far."""
        return self._digest.digest()
