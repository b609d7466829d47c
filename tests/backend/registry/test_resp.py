"""Redis's wire format."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.resp import Refusal, Reply, ReplyReader, pack

WIRE = b"+OK\r\n:-7\r\n$-1\r\n$0\r\n\r\n$7\r\nh\xc3\xa4\r\nll\r\n-ERR no\r\n*3\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n*0\r\n*-1\r\n"
SAID: list[Reply] = ["OK", -7, None, "", "hä\r\nll", Refusal("ERR no"), [1, ["a", None], []], None]


def test_every_kind_of_answer() -> None:
    assert ReplyReader().feed(WIRE) == SAID


@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    reader, got = ReplyReader(), []
    places = [0, *sorted(cuts), len(WIRE)]
    for begin, end in pairwise(places):
        got += reader.feed(WIRE[begin:end])
    assert got == SAID


@pytest.mark.parametrize("wire", [b"_\r\n", b":x\r\n", b"$1\r\n\xff\r\n", b"HTTP/1.1 400\r\n"])
def test_what_is_no_answer(wire: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        ReplyReader().feed(wire)


def test_commands() -> None:
    assert pack("SET", "kä", 12) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\xc3\xa4\r\n$2\r\n12\r\n"
