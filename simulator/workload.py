"""PURE. What is asked of a cluster: the traces of the paper as distributions, arrivals by rate and burstiness, and traces read from CSV.

Arrivals are a Gamma process: its coefficient of variation (CV) is 1 for Poisson, more for bursts. Lengths, arrivals and tiers come from
streams of chance of their own, so that another rate or another share of urgent requests leaves the lengths as they are.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from simulator.lengths import Quantiles, fit

HEADER = ("arrival_s", "prompt_tokens", "output_tokens", "tier")

SHORT = Quantiles(128, 38, 113, 413, 1464)
MEDIUM = Quantiles(256, 32, 173, 1288, 4208)
LONG = Quantiles(512, 55, 582, 3113, 5166)
EVEN = Quantiles(64, 64, 64, 64, 64, longest=64, shortest=64)
TRACES: dict[str, tuple[Quantiles, Quantiles]] = {
    "ShareGPT": (Quantiles(306, 74, 348, 1484, 3388), Quantiles(500, 487, 781, 988, 1234, longest=4000)),
    "BurstGPT": (Quantiles(830, 582, 1427, 2345, 3549), Quantiles(271, 243, 434, 669, 964, longest=4000)),
    "S-S": (SHORT, SHORT),
    "M-M": (MEDIUM, MEDIUM),
    "L-L": (LONG, LONG),
    "S-L": (SHORT, LONG),
    "L-S": (LONG, SHORT),
    "64-64": (EVEN, EVEN),
}
"""Prompt and output lengths of the paper's table. Where they end is not in it: here at 6,000 tokens, the maximum it names for generated
lengths, and at 4,000 for the answers of the real traces (docs/simulator.md says why). `64-64` is the stress test's: every request alike."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tier: str = "normal"


def generate(trace: str, *, requests: int, rate: float, cv: float, seed: int, high_share: float) -> list[Arrival]:
    """`requests` arrivals at `rate` a second, a share of them of tier `high`. Raises KeyError for an unknown trace."""
    prompt, output = (fit(known) for known in TRACES[trace])
    gaps, lengths, tiers = (Random(f"{seed}-{trace}-{stream}") for stream in ("gaps", "lengths", "tiers"))
    shape = 1 / cv**2
    now_s = 0.0
    arrivals = []
    for _ in range(requests):
        now_s += gaps.gammavariate(shape, 1 / (rate * shape))
        tier = "high" if tiers.random() < high_share else "normal"
        arrivals.append(Arrival(now_s, prompt.sample(lengths), output.sample(lengths), tier))
    return arrivals


def read_csv(lines: Iterable[str]) -> list[Arrival]:
    """A trace with the columns of HEADER (the tier may be missing), in order of arrival. Raises TraceError."""
    reader = csv.DictReader(lines)
    names = tuple(reader.fieldnames or ())
    for name in HEADER[:3]:
        if name not in names:
            raise TraceError(f"the trace has no column '{name}'")
    for name in names:
        if name not in HEADER:
            raise TraceError(f"the trace has an unknown column '{name}'")
    arrivals = [_arrival(row, line) for line, row in enumerate(reader, start=2)]
    return sorted(arrivals, key=lambda each: each.arrival_s)


def csv_rows(arrivals: Sequence[Arrival]) -> Iterable[tuple[str, ...]]:
    """The rows of a trace file, header first."""
    yield HEADER
    for each in arrivals:
        yield (f"{each.arrival_s:.6f}", str(each.prompt_tokens), str(each.output_tokens), each.tier)


def _arrival(row: dict[str, str], line: int) -> Arrival:
    try:
        arrival = Arrival(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), row.get("tier") or "normal")
    except (TypeError, ValueError) as error:
        raise TraceError(f"line {line} of the trace: {error}") from error
    if not 0 <= arrival.arrival_s < float("inf") or arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        raise TraceError(f"line {line} of the trace: arrival_s must be at least 0, prompt_tokens and output_tokens at least 1")
    return arrival
