"""PURE. What a simulation measured: per request, and summed up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

PER_REQUEST_HEADER = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "tier",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "preemption_loss_s",
    "preemptions",
    "migrations",
    "instance",
)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One finished request. `tpot_s` is the mean time from token to token; None if there was only one token.

    `preemption_loss_s` is the time from being preempted to the next token, over all its preemptions.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tier: str
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    preemption_loss_s: float
    preemptions: int
    migrations: int
    instance: str

    def row(self) -> tuple[str, ...]:
        """Under PER_REQUEST_HEADER."""
        tpot = "" if self.tpot_s is None else f"{self.tpot_s:.6f}"
        times = (f"{self.ttft_s:.6f}", tpot, f"{self.e2e_s:.6f}", f"{self.preemption_loss_s:.6f}")
        head = (f"{self.arrival_s:.6f}", str(self.prompt_tokens), str(self.output_tokens), self.tier)
        return (*head, *times, str(self.preemptions), str(self.migrations), self.instance)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `fragmentation` is sampled each second while requests come."""

    requests: tuple[RequestOutcome, ...]
    fragmentation: tuple[float, ...]
    migrations: int
    instances_mean: float
    wall_s: float = 0.0

    def to_json(self) -> dict[str, object]:
        """The summary, with the same figures for each tier."""
        tiers = sorted({each.tier for each in self.requests})
        return {
            **_figures(self.requests),
            "fragmentation": {"mean": mean(self.fragmentation)},
            "migrations": self.migrations,
            "instances_mean": self.instances_mean,
            "tiers": {tier: _figures([each for each in self.requests if each.tier == tier]) for tier in tiers},
            "wall_s": self.wall_s,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a set of measurements; zeros if there are none."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        """By nearest rank."""
        ranked = sorted(values)
        if not ranked:
            return Spread(0.0, 0.0, 0.0)
        return Spread(mean(ranked), *(ranked[ceil(share * len(ranked)) - 1] for share in (0.5, 0.99)))

    def to_json(self) -> dict[str, float]:
        """As in the summary."""
        return {"mean": self.mean, "p50": self.p50, "p99": self.p99}


def mean(values: Sequence[float]) -> float:
    """0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def longest_prompts(requests: Sequence[RequestOutcome], share: float = 0.01) -> Sequence[RequestOutcome]:
    """Those with the longest prompts: that share of all, at least one."""
    count = max(1, round(share * len(requests)))
    return sorted(requests, key=lambda each: -each.prompt_tokens)[:count]


def _figures(requests: Sequence[RequestOutcome]) -> dict[str, object]:
    return {
        "ttft_s": Spread.of(each.ttft_s for each in requests).to_json(),
        "tpot_s": Spread.of(each.tpot_s for each in requests if each.tpot_s is not None).to_json(),
        "e2e_s": Spread.of(each.e2e_s for each in requests).to_json(),
        "preemption_loss_s": mean([each.preemption_loss_s for each in requests]),
        "preemptions": sum(each.preemptions for each in requests),
    }
