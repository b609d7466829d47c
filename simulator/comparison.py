"""PURE. One policy's outcome beside another's."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log

from simulator.outcome import Outcome, Spread, longest_prompts, mean


@dataclass(frozen=True, slots=True)
class Figures:
    """What policies are compared by, in seconds; less is better."""

    e2e_mean: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    preemption_loss: float
    longest_ttft: float
    """Mean time to first token of the longest 1 % of prompts."""

    @staticmethod
    def of(outcome: Outcome) -> "Figures":
        """Of one run."""
        ttft = Spread.of(each.ttft_s for each in outcome.requests)
        tpot = Spread.of(each.tpot_s for each in outcome.requests if each.tpot_s is not None)
        return Figures(
            e2e_mean=mean([each.e2e_s for each in outcome.requests]),
            ttft_mean=ttft.mean,
            ttft_p99=ttft.p99,
            tpot_mean=tpot.mean,
            tpot_p99=tpot.p99,
            preemption_loss=mean([each.preemption_loss_s for each in outcome.requests]),
            longest_ttft=mean([each.ttft_s for each in longest_prompts(outcome.requests)]),
        )

    def values(self) -> tuple[float, ...]:
        """In the order of NAMES."""
        return (
            self.e2e_mean,
            self.ttft_mean,
            self.ttft_p99,
            self.tpot_mean,
            self.tpot_p99,
            self.preemption_loss,
            self.longest_ttft,
        )


NAMES = ("end-to-end", "TTFT", "TTFT P99", "TPOT", "TPOT P99", "preemption", "longest 1 %")


def ratios(runs: Sequence[Figures], base: Sequence[Figures]) -> tuple[float, ...]:
    """Each figure of `runs` over that of `base`, seed by seed; their geometric mean. 1 where both are 0, inf where only the base is."""
    pairs = [tuple(zip(run.values(), other.values(), strict=True)) for run, other in zip(runs, base, strict=True)]
    return tuple(_geometric_mean([_ratio(*pair[number]) for pair in pairs]) for number in range(len(NAMES)))


def _ratio(value: float, base: float) -> float:
    if base > 0:
        return value / base
    return inf if value > 0 else 1.0


def _geometric_mean(values: Sequence[float]) -> float:
    if any(value == 0 for value in values):
        return 0.0
    return exp(sum(log(value) for value in values) / len(values))
