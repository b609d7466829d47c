"""What is copied when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from migration.stages import CopyStage, LastStage, last_range, next_stage, room_tokens

BLOCK = 16


def stage(settled: int, copied: int = 0, stages: int = 0, max_stages: int = 8) -> CopyStage | LastStage:
    return next_stage(
        settled_tokens=settled, block_tokens=BLOCK, copied_blocks=copied, stages=stages, max_stages=max_stages, last_stage_blocks=2
    )


def test_normal_case_is_two_stages() -> None:
    assert stage(1000) == CopyStage(0, 62)
    assert stage(1003, copied=62, stages=1) == LastStage()
    assert last_range(computed_tokens=1005, block_tokens=BLOCK, copied_blocks=62) == (62, 63)


def test_short_request_is_frozen_at_once() -> None:
    assert stage(2 * BLOCK + 5) == LastStage()
    assert stage(3 * BLOCK) == CopyStage(0, 3)


def test_last_stage_of_all_is_the_last_one_allowed() -> None:
    assert stage(1000, copied=10, stages=6) == CopyStage(10, 62)
    assert stage(1000, copied=10, stages=7) == LastStage()
    assert stage(1000, max_stages=1) == LastStage()


def test_cached_prefix_counts_as_copied() -> None:
    assert stage(1000, copied=61) == LastStage()
    assert stage(1000, copied=100) == LastStage()
    assert last_range(computed_tokens=10, block_tokens=BLOCK, copied_blocks=4) == (1, 1)


def test_nothing_computed_is_nothing_to_copy() -> None:
    assert last_range(computed_tokens=0, block_tokens=BLOCK, copied_blocks=0) == (0, 0)


def test_room_grows_with_what_decoding_adds() -> None:
    assert room_tokens(tokens=100, growth_tokens=7, head_room_blocks=2, block_tokens=BLOCK) == 139


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 5000), st.lists(st.integers(0, 200), min_size=10, max_size=10), st.integers(1, 8))
def test_every_block_is_copied_exactly_once(tokens: int, growth: list[int], max_stages: int) -> None:
    copied: list[int] = []
    stages = 0
    while isinstance(step := stage(tokens, len(copied), stages, max_stages), CopyStage):
        assert step.first_block == len(copied)
        assert step.end_block * BLOCK <= tokens
        copied += range(step.first_block, step.end_block)
        tokens += growth[stages]
        stages += 1
    first, end = last_range(computed_tokens=tokens, block_tokens=BLOCK, copied_blocks=len(copied))
    copied += range(first, end)
    assert copied == list(range(-(-tokens // BLOCK)))
    assert stages < max_stages
