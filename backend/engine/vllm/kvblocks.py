"""The KV cache of one worker as blocks of bytes: gather them into a buffer, scatter them from one.

vLLM views every layer's cache as [blocks, heads, tokens, content], whatever lies how in memory, and addresses dimension 0 by the
scheduler's block ids (a scheduler block may be several kernel blocks). Layers that alias one another are moved once. Where all
layers of a block lie together in memory, a block is moved as one piece.
"""

from collections.abc import Iterable, Sequence

import torch


class KVBlocks:
    """Gather and scatter over all layers. Buffers are contiguous uint8 tensors of blocks * block_bytes."""

    def __init__(self, caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        self.parts = _parts(list(caches), num_blocks)
        if not self.parts:
            raise ValueError("the worker has no KV cache")
        self.device = self.parts[0].device
        self.num_blocks = num_blocks
        self._bytes = [part[0].numel() * part.element_size() for part in self.parts]
        self.block_bytes = sum(self._bytes)

    @property
    def shape(self) -> str:
        """The shape of one block, as text, for comparing layouts."""
        return "x".join(str(size) for size in self.parts[0].shape[1:])

    def gather(self, blocks: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy these blocks into the buffer: part by part, block by block."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for part, piece in self._pieces(buffer, len(blocks)):
            torch.index_select(part, 0, index, out=piece)

    def scatter(self, blocks: Sequence[int], buffer: torch.Tensor) -> None:
        """The inverse of gather."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for part, piece in self._pieces(buffer, len(blocks)):
            part.index_copy_(0, index, piece)

    def _pieces(self, buffer: torch.Tensor, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for part, size in zip(self.parts, self._bytes, strict=True):
            end = start + size * count
            yield part, buffer[start:end].view(part.dtype).view(count, *part.shape[1:])
            start = end


def _parts(caches: list[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    whole = _whole_storage(caches, num_blocks)
    if whole is not None:
        return [whole]
    parts, seen = [], set()
    for cache in caches:
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        per_block, rest = divmod(cache.shape[0], num_blocks)
        if rest:
            raise ValueError(f"{cache.shape[0]} kernel blocks are not a multiple of {num_blocks} blocks")
        parts.append(cache.unflatten(0, (num_blocks, per_block)))
    return parts


def _whole_storage(caches: list[torch.Tensor], num_blocks: int) -> torch.Tensor | None:
    """One view of [blocks, bytes] if a block's layers lie together, else None."""
    if not caches:
        return None
    first = caches[0]
    storage = first.untyped_storage()
    per_block = first.shape[0] // num_blocks
    stride = first.stride(0) * first.element_size() * per_block
    same = all(cache.untyped_storage().data_ptr() == storage.data_ptr() for cache in caches)
    if not same or storage.nbytes() != num_blocks * stride:
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage).view(num_blocks, -1)
