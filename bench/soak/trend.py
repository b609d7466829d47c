"""PURE. Whether a series of measurements rises, or only goes up and down.

The series is cut into a few stretches; each stretch has its least value, which is what a process needs, without what it had not yet given
back. The slope is the median of the slopes between any two stretches (Theil and Sen), the noise how far the stretches lie from that line.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STRETCHES = 8
WARM_SHARE, WARM_S, WARM_SHARE_AT_MOST = 0.25, 150.0, 0.5
"""The first quarter is left out, and two and a half minutes, but no more than half: what is remembered for two minutes fills first."""
SMALL_SHARE = 0.02
"""Less growth than this, of the whole, in the time measured is no growth that can be told from chance."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one series. `noise` is in the series' unit, `per_minute` in that unit a minute."""

    first: float
    last: float
    per_minute: float
    noise: float
    rises: bool


def trend_of(at_s: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of a series of at least STRETCHES values after its warm part. Raises ValueError."""
    span_s = at_s[-1] - at_s[0] if at_s else 0.0
    warm_s = min(max(WARM_SHARE * span_s, WARM_S), WARM_SHARE_AT_MOST * span_s)
    warm = sum(moment - at_s[0] < warm_s for moment in at_s)
    times, series = at_s[warm:], values[warm:]
    if len(series) < STRETCHES:
        raise ValueError(f"{len(values)} measurements are too few")
    edges = [len(series) * stretch // STRETCHES for stretch in range(STRETCHES + 1)]
    middles = [statistics.fmean(times[a:b]) for a, b in pairwise(edges)]
    lows = [min(series[a:b]) for a, b in pairwise(edges)]
    pairs = [(i, j) for i in range(STRETCHES) for j in range(i + 1, STRETCHES)]
    slope = statistics.median([(lows[j] - lows[i]) / (middles[j] - middles[i]) for i, j in pairs])
    offsets = [low - slope * middle for low, middle in zip(lows, middles, strict=True)]
    noise = max(offsets) - min(offsets)
    growth = slope * (middles[-1] - middles[0])
    return Trend(lows[0], lows[-1], slope * 60, noise, growth > max(noise, SMALL_SHARE * lows[0]))
