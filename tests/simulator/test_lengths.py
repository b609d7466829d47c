from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.lengths import Lengths, fit
from simulator.workload import TRACES

PUBLISHED = {known for pair in TRACES.values() for known in pair}


@pytest.mark.parametrize("known", sorted(PUBLISHED, key=str), ids=lambda known: f"{known.mean}")
def test_a_fit_has_the_published_mean_and_quantiles(known: object) -> None:
    quantiles = next(each for each in PUBLISHED if each == known)
    lengths = fit(quantiles)
    assert lengths.mean == pytest.approx(quantiles.mean, rel=2e-3)
    at = [lengths.quantile(p) for p in (0.5, 0.8, 0.95, 0.99, 1.0)]
    assert at == pytest.approx([quantiles.p50, quantiles.p80, quantiles.p95, quantiles.p99, quantiles.longest])
    rng = Random(1)
    sampled = sorted(lengths.sample(rng) for _ in range(20_000))
    assert sampled[0] >= 1
    assert sampled[10_000] == pytest.approx(quantiles.p50, rel=0.1)
    assert sum(sampled) / 20_000 == pytest.approx(quantiles.mean, rel=0.05)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.2, 5), st.floats(0.2, 5))
def test_the_quantile_function_rises(p: float, q: float, low_bend: float, high_bend: float) -> None:
    lengths = Lengths((1, 50, 100, 1000, 2000, 6000), low_bend, high_bend)
    low, high = sorted((p, q))
    assert lengths.quantile(low) <= lengths.quantile(high) * (1 + 1e-9)
