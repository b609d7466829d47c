import pytest

from gateway.policy.pace import MAX_RETRY_S, Pace, retry_after_s


def test_the_rate_is_what_left_by_how_long_it_took() -> None:
    pace = Pace(100, 0.0).seen(110, 2.0)
    assert pace.per_s == 5.0
    assert pace.seen(120, 4.0).per_s == pytest.approx(5.0)


def test_it_follows_a_change_without_jumping() -> None:
    pace = Pace(0, 0.0).seen(100, 1.0).seen(100, 6.0)
    assert pace.per_s is not None
    assert 50 < pace.per_s < 70
    for at_s in range(7, 100):
        pace = pace.seen(100, float(at_s))
    assert pace.per_s is not None
    assert pace.per_s < 0.1


def test_looks_in_quick_succession_are_one() -> None:
    pace = Pace(0, 0.0)
    for n in range(1, 10):
        pace = pace.seen(n, n * 0.05)
    assert pace.per_s == pytest.approx(20.0)


def test_a_counter_that_went_back_begins_anew() -> None:
    assert Pace(50, 0.0, 9.0).seen(3, 1.0) == Pace(3, 1.0)


@pytest.mark.parametrize(
    ("before", "per_s", "expected"),
    [(0, None, 1), (9, 2.0, 5), (10, 2.0, 6), (0, 100.0, 1), (10_000, 1.0, MAX_RETRY_S), (3, 0.0, MAX_RETRY_S)],
)
def test_when_to_come_again(before: int, per_s: float | None, expected: int) -> None:
    assert retry_after_s(before, per_s) == expected
