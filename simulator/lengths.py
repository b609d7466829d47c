"""PURE. Distributions of prompt and output lengths, fitted to published quantiles.

A distribution is known by its mean and its 50th, 80th, 95th and 99th percentile; it ends at `longest`. Between two known quantiles, a at p
and b at q, the quantile function is a (b / a)^(u^g), u running from 0 at p to 1 at q: logarithmic for g = 1. The bend g of the first
stretch, from one token to the median, is chosen in [0.2, 1] so that the mean is met; where that is not enough, the bend of the upper
stretches is, too.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

_PERCENTILES = (0.0, 0.5, 0.8, 0.95, 0.99, 1.0)
_CELLS = 400
_LOW_BENDS = (0.2, 1.0)
_HIGH_BENDS = (0.2, 5.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What is published of one distribution, in tokens."""

    mean: float
    p50: int
    p80: int
    p95: int
    p99: int
    longest: int = 6000
    shortest: int = 1

    @property
    def knots(self) -> tuple[int, ...]:
        """The quantile function at _PERCENTILES."""
        return (self.shortest, self.p50, self.p80, self.p95, self.p99, self.longest)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A fitted distribution."""

    knots: tuple[int, ...]
    low_bend: float
    high_bend: float

    def quantile(self, p: float) -> float:
        """Tokens that the share `p` of all lengths does not exceed."""
        stretch = min(bisect_right(_PERCENTILES, p), len(_PERCENTILES) - 1) - 1
        return self._at(stretch, (p - _PERCENTILES[stretch]) / (_PERCENTILES[stretch + 1] - _PERCENTILES[stretch]))

    def sample(self, rng: Random) -> int:
        """One length, at least 1."""
        return max(1, round(self.quantile(rng.random())))

    @property
    def mean(self) -> float:
        """By the midpoint rule on each stretch."""
        total = 0.0
        for stretch in range(len(_PERCENTILES) - 1):
            cells = sum(self._at(stretch, (cell + 0.5) / _CELLS) for cell in range(_CELLS))
            total += cells / _CELLS * (_PERCENTILES[stretch + 1] - _PERCENTILES[stretch])
        return total

    def _at(self, stretch: int, u: float) -> float:
        low, high = self.knots[stretch], self.knots[stretch + 1]
        bend = self.high_bend if stretch else self.low_bend
        return float(low * (high / low) ** (u**bend))


def fit(known: Quantiles) -> Lengths:
    """The distribution with these quantiles and this mean (to 0.1 %, if the quantiles allow it at all)."""
    low_bend = _bisect(lambda bend: Lengths(known.knots, bend, 1.0).mean, known.mean, _LOW_BENDS)
    high_bend = _bisect(lambda bend: Lengths(known.knots, low_bend, bend).mean, known.mean, _HIGH_BENDS)
    return Lengths(known.knots, low_bend, high_bend)


def _bisect(mean: Callable[[float], float], wanted: float, bends: tuple[float, float]) -> float:
    """The bend within `bends` whose mean comes nearest; the mean falls as the bend rises. 1 if that is near enough."""
    if abs(mean(1.0) - wanted) < 1e-4 * wanted:
        return 1.0
    low, high = bends
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > wanted else (low, middle)
    return (low + high) / 2
