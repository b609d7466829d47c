"""Blocks are gathered and scattered the same, however the layers lie in memory."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the light environment has no torch")

from backend.engine.vllm.kvblocks import KVBlocks  # noqa: E402  # after the skip

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 10, 2, 4, 8


def layers_apart() -> list[Any]:
    return [torch.randn(BLOCKS, HEADS, TOKENS, CONTENT) for _ in range(LAYERS)]


def layers_of_a_block_together() -> list[Any]:
    whole = torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)
    return [whole[:, layer] for layer in range(LAYERS)]


def two_kernel_blocks_a_block() -> list[Any]:
    return [torch.randn(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) for _ in range(LAYERS)]


@pytest.mark.parametrize("make", [layers_apart, layers_of_a_block_together, two_kernel_blocks_a_block])
def test_what_is_gathered_can_be_scattered_elsewhere(make: object) -> None:
    assert callable(make)
    source, destination = make(), make()
    from_, to = KVBlocks(source, BLOCKS), KVBlocks(destination, BLOCKS)
    untouched = [cache.clone() for cache in destination]
    buffer = torch.empty(3 * from_.block_bytes, dtype=torch.uint8)

    from_.gather([7, 2, 5], buffer)
    to.scatter([0, 9, 4], buffer)

    per_block = source[0].shape[0] // BLOCKS
    for layer in range(LAYERS):
        blocks = source[layer].unflatten(0, (BLOCKS, per_block))
        moved = destination[layer].unflatten(0, (BLOCKS, per_block))
        assert torch.equal(moved[[0, 9, 4]], blocks[[7, 2, 5]])
        others = [block for block in range(BLOCKS) if block not in (0, 9, 4)]
        assert torch.equal(moved[others], untouched[layer].unflatten(0, (BLOCKS, per_block))[others])


def test_a_block_whose_layers_lie_together_is_one_piece() -> None:
    together, apart = KVBlocks(layers_of_a_block_together(), BLOCKS), KVBlocks(layers_apart(), BLOCKS)
    assert (len(together.parts), len(apart.parts)) == (1, LAYERS)
    assert together.block_bytes == apart.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * 4


def test_layers_that_share_a_cache_are_moved_once() -> None:
    cache = torch.randn(BLOCKS, HEADS, TOKENS, CONTENT)
    blocks = KVBlocks([cache, cache, torch.randn(BLOCKS, HEADS, TOKENS, CONTENT)], BLOCKS)
    assert len(blocks.parts) == 2


def test_caches_that_cannot_be_addressed_by_block_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        KVBlocks([torch.randn(BLOCKS + 1, HEADS), torch.randn(BLOCKS + 1, HEADS)], BLOCKS)
    with pytest.raises(ValueError, match="no KV cache"):
        KVBlocks([], BLOCKS)
