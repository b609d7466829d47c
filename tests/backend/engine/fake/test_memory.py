from hypothesis import given
from hypothesis import strategies as st

from backend.engine.fake.chain import TokenChain
from backend.engine.fake.memory import KVMemory


def filled(tokens: list[int], table: list[int]) -> KVMemory:
    memory = KVMemory(8, 4, 64)
    for position, token in enumerate(tokens):
        memory.compute(table, position, token)
    return memory


def test_the_same_tokens_leave_the_same_bytes_in_any_blocks() -> None:
    tokens = list(range(11))
    first, second = filled(tokens, [0, 1, 2]), filled(tokens, [7, 3, 5])
    assert [bytes(first.read(b)) for b in (0, 1, 2)] == [bytes(second.read(b)) for b in (7, 3, 5)]
    assert first.reading([0, 1, 2], 11) == second.reading([7, 3, 5], 11)


@given(st.integers(0, 10), st.integers(0, 63), st.integers(1, 255))
def test_any_wrong_byte_of_what_is_read_shows(position: int, offset: int, flip: int) -> None:
    memory = filled(list(range(11)), [0, 1, 2])
    before = memory.reading([0, 1, 2], 11)
    block = position // 4
    if block == 2:
        offset %= 48
    memory.write(block, bytes([memory.read(block)[offset] ^ flip]), offset)
    assert memory.reading([0, 1, 2], 11) != before


def test_a_wrong_byte_in_one_block_shows_in_all_computed_later() -> None:
    right = filled(list(range(12)), [0, 1, 2])
    wrong = filled(list(range(4)), [0, 1, 2])
    wrong.write(0, b"x")
    for position in range(4, 12):
        wrong.compute([0, 1, 2], position, position)
    assert bytes(right.read(2)) != bytes(wrong.read(2))


def test_bytes_after_the_last_token_are_not_read() -> None:
    memory = filled(list(range(6)), [0, 1])
    before = memory.reading([0, 1], 6)
    memory.write(1, b"y" * 32, 32)
    assert memory.reading([0, 1], 6) == before


def test_equal_keys_mean_equal_prefixes() -> None:
    first, second = TokenChain(2, []), TokenChain(2, [])
    for token in (1, 2, 3, 4, 5):
        first.push(token)
    for token in (1, 2, 9, 4):
        second.push(token)
    assert len(first.keys) == len(second.keys) == 2
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    assert first.digest() != second.digest()
