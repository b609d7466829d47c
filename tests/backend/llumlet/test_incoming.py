import pytest

from backend.llumlet.incoming import rank_of
from migration.messages import HttpRequest


@pytest.mark.parametrize(
    ("value", "rank"), [("0", 0), ("1000", 1000), (None, 1), ("", 1), ("-1", 1), ("2.5", 1), ("12345", 1), ("\u0663", 1), ("high", 1)]
)
def test_the_rank_is_a_small_number_or_the_usual_one(value: str | None, rank: int) -> None:
    headers = () if value is None else (("x-midstream-rank", value),)
    assert rank_of(HttpRequest("/v1/completions", headers, b"")) == rank
