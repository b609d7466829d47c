import pytest

from backend.engine.blocks import BlockPool


def test_taken_blocks_are_distinct_and_come_back() -> None:
    pool = BlockPool(4)
    taken = pool.take(4)
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.free_blocks == 0
    pool.release(taken)
    assert pool.free_blocks == 4


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted"):
        pool.take(3)
    assert pool.free_blocks == 2


def test_a_block_held_twice_is_free_after_the_second_release() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.free_blocks == 0
    pool.release(blocks)
    assert pool.free_blocks == 1


def test_releasing_what_is_not_held_is_an_error() -> None:
    with pytest.raises(ValueError, match="not held"):
        BlockPool(1).release([0])


def test_a_free_block_cannot_be_held_unless_it_carries_something() -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        BlockPool(1).hold([0])


def test_a_known_prefix_is_found_after_its_release_and_forgotten_tail_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block, key in zip(blocks, (10, 11, 12), strict=True):
        pool.remember(block, key)
    pool.release(blocks)
    assert pool.match((10, 11, 12, 13)) == blocks
    pool.take(1)
    assert pool.match((10, 11, 12)) == blocks[:2]
    pool.hold(blocks[:2])
    assert pool.free_blocks == 0


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.remember(first, 7)
    pool.remember(second, 7)
    assert pool.match((7,)) == [first]
