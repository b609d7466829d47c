"""PURE. The KV blocks of one engine: who holds which, and which free ones still carry a known prefix.

A block is *held* (by request tables and pins, counted), or free. A free block that carries a known prefix stays findable until it is
taken for something else, least recently freed first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Counts holders of `capacity_blocks` blocks, numbered from 0. Knows no requests."""

    __slots__ = ("_blank", "_block_of_key", "_cached", "_holders", "_key_of_block", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._holders = [0] * capacity_blocks
        self._blank = list(range(capacity_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of_block: dict[int, int] = {}
        self._block_of_key: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._blank) + len(self._cached)

    def holders(self, block: int) -> int:
        """How many tables and pins hold this block."""
        return self._holders[block]

    def take(self, blocks: int) -> list[int]:
        """Hold that many free blocks, forgetting what they carried. Raises ValueError, and takes none, if there are too few."""
        if blocks > self.free_blocks:
            raise ValueError(f"{blocks} blocks wanted, {self.free_blocks} free")
        taken = []
        for _ in range(blocks):
            block = self._blank.pop() if self._blank else self._evict()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold these blocks once more; what they carry is kept."""
        for block in blocks:
            if self._holders[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and carries nothing")
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. The tail of a prefix is forgotten before its head."""
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is not held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key_of_block:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def match(self, keys: Iterable[int]) -> list[int]:
        """The blocks that carry the longest known run of these keys, from the first on. They are not held yet."""
        found = []
        for key in keys:
            block = self._block_of_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def remember(self, block: int, key: int) -> None:
        """This held, complete block carries the prefix named `key`. Ignored if another block is known for that key."""
        if key not in self._block_of_key and block not in self._key_of_block:
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of_key[self._key_of_block.pop(block)]
        return block
