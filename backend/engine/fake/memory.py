"""PURE. KV blocks as real bytes: what a token leaves behind, and the digest of all a next token reads.

A block is `block_tokens` slots. A slot is derived from its token, its position and the slot before it, or, for the first of a block,
from the digest of the whole block before. So a wrong byte anywhere shows in all that is computed after it.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16
_POSITION = struct.Struct("<qq")


class KVMemory:
    """All KV bytes of one engine."""

    def __init__(self, blocks: int, block_tokens: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._slot_bytes = block_bytes // block_tokens
        self._bytes = memoryview(bytearray(blocks * block_bytes))
        self._digests: list[bytes | None] = [None] * blocks
        """Of whole blocks, forgotten at every write."""

    def read(self, block: int) -> memoryview:
        """The bytes of a block."""
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes].toreadonly()

    def write(self, block: int, data: bytes | memoryview, offset: int = 0) -> None:
        """Overwrite bytes of a block."""
        if offset + len(data) > self.block_bytes:
            raise ValueError(f"{len(data)} bytes at {offset} of a block of {self.block_bytes}")
        start = block * self.block_bytes + offset
        self._bytes[start : start + len(data)] = data
        self._digests[block] = None

    def compute(self, table: Sequence[int], position: int, token: int) -> None:
        """Leave behind what `token` at `position` of the request with that block table leaves."""
        index, slot = divmod(position, self._block_tokens)
        if slot:
            before: bytes | memoryview = self._slots(table[index], slot - 1, slot)
        else:
            before = self._digest(table[index - 1]) if index else b""
        digest = blake2b(_POSITION.pack(token, position), digest_size=_DIGEST_BYTES, key=b"slot")
        digest.update(before)
        data = digest.digest() * (self._slot_bytes // _DIGEST_BYTES + 1)
        self.write(table[index], data[: self._slot_bytes], slot * self._slot_bytes)

    def reading(self, table: Sequence[int], tokens: int) -> bytes:
        """A digest of the KV of the first `tokens` tokens: all that the next token reads."""
        whole, rest = divmod(tokens, self._block_tokens)
        digest = blake2b(b"".join([self._digest(block) for block in table[:whole]]), digest_size=_DIGEST_BYTES)
        if rest:
            digest.update(self._slots(table[whole], 0, rest))
        return digest.digest()

    def _slots(self, block: int, first: int, end: int) -> memoryview:
        start = block * self.block_bytes
        return self._bytes[start + first * self._slot_bytes : start + end * self._slot_bytes]

    def _digest(self, block: int) -> bytes:
        digest = self._digests[block]
        if digest is None:
            digest = self._digests[block] = blake2b(self.read(block), digest_size=_DIGEST_BYTES).digest()
        return digest
