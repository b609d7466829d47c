"""PURE. Which blocks are copied when, and how much memory is asked for.

    block      0   1   2   3   4   5   6   7   8~
               |cached |copied |complete, new  | being filled
                       ^copied_blocks          ^settled_tokens // block_tokens

Complete blocks are copied while the request decodes, as long as more than `last_stage_blocks` of them are left and a stage is left
for the rest. Then the request is frozen, and the last stage takes everything not copied yet, the partial block included. One copied
stage and the last one are the normal case: what decoding adds during the first is less than the bound.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyStage:
    """Copy blocks [first_block, end_block) while the request runs."""

    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class LastStage:
    """Freeze now and copy the rest."""


def next_stage(
    *, settled_tokens: int, block_tokens: int, copied_blocks: int, stages: int, max_stages: int, last_stage_blocks: int
) -> CopyStage | LastStage:
    """What to do after `stages` stages, with blocks up to `copied_blocks` at the destination. `max_stages` counts the last one."""
    complete_blocks = settled_tokens // block_tokens
    if complete_blocks - copied_blocks > last_stage_blocks and stages + 1 < max_stages:
        return CopyStage(copied_blocks, complete_blocks)
    return LastStage()


def last_range(*, computed_tokens: int, block_tokens: int, copied_blocks: int) -> tuple[int, int]:
    """Blocks [first, end) of the last stage: up to and with the block that holds the last computed token."""
    end_block = -(-computed_tokens // block_tokens)
    return min(copied_blocks, end_block), end_block


def room_tokens(*, tokens: int, growth_tokens: int, head_room_blocks: int, block_tokens: int) -> int:
    """Memory to ask for, in tokens: those there are, those that decoding adds while a stage is copied, and the head room."""
    return tokens + growth_tokens + head_room_blocks * block_tokens
