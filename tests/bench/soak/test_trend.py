from random import Random

import pytest

from bench.soak.trend import STRETCHES, trend_of

SECONDS = [float(second) for second in range(600)]


def wobbling(seed: int, per_s: float, noise: float = 800.0) -> list[float]:
    """40 MB that rises so fast, under garbage that comes and goes."""
    random = Random(seed)
    return [40_000 + per_s * second + random.uniform(0, noise) for second in SECONDS]


@pytest.mark.parametrize("seed", range(20))
def test_up_and_down_is_no_rise(seed: int) -> None:
    assert not trend_of(SECONDS, wobbling(seed, 0.0)).rises


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_under_the_same_noise(seed: int) -> None:
    trend = trend_of(SECONDS, wobbling(seed, 5.0))
    assert trend.rises
    assert trend.per_minute == pytest.approx(300, rel=0.1)


def test_what_fills_at_the_beginning_and_then_stays_is_no_leak() -> None:
    assert not trend_of(SECONDS, [40_000 + 50 * min(second, 120) for second in SECONDS]).rises


def test_in_a_short_run_half_is_left_to_fill() -> None:
    assert not trend_of(SECONDS[:240], [40_000 + 50 * min(second, 115) for second in SECONDS[:240]]).rises


def test_what_falls_does_not_rise() -> None:
    assert not trend_of(SECONDS, wobbling(1, -5.0)).rises


def test_one_descriptor_a_minute_is_found() -> None:
    assert trend_of(SECONDS, [20 + second // 60 for second in SECONDS]).rises
    assert not trend_of(SECONDS, [20.0 + (second % 7 == 0) for second in SECONDS]).rises


def test_too_few() -> None:
    with pytest.raises(ValueError):
        trend_of(SECONDS[: STRETCHES - 1], SECONDS[: STRETCHES - 1])
