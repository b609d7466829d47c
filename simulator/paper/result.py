"""PURE. What is kept of one run: its figures, for all requests and for each tier, as a value that goes to a file and comes back."""

import json
from dataclasses import dataclass

from migration.typed_json import decode, encode
from simulator.outcome import Outcome, RequestOutcome, Spread, longest_prompts, mean

ALL = "all"
_SAMPLES_A_POINT = 10


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Seconds, over the finished requests of one tier (or of all)."""

    tier: str
    requests: int
    e2e_mean: float
    e2e_p99: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    preemption_loss: float
    longest_ttft: float
    """Mean time to first token of the longest 1 % of prompts."""

    @staticmethod
    def of(tier: str, requests: list[RequestOutcome]) -> "TierFigures":
        """Of these requests; at least one."""
        e2e = Spread.of(each.e2e_s for each in requests)
        ttft = Spread.of(each.ttft_s for each in requests)
        tpot = Spread.of(each.tpot_s for each in requests if each.tpot_s is not None)
        return TierFigures(
            tier=tier,
            requests=len(requests),
            e2e_mean=e2e.mean,
            e2e_p99=e2e.p99,
            ttft_mean=ttft.mean,
            ttft_p50=ttft.p50,
            ttft_p99=ttft.p99,
            tpot_mean=tpot.mean,
            tpot_p99=tpot.p99,
            preemption_loss=mean([each.preemption_loss_s for each in requests]),
            longest_ttft=mean([each.ttft_s for each in longest_prompts(requests)]),
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """`fragmentation` is the share of all memory, in means over ten seconds, while requests came."""

    tiers: tuple[TierFigures, ...]
    fragmentation: tuple[float, ...]
    preemptions: int
    migrations: int
    instances_mean: float
    duration_s: float
    """From the beginning to the end of the last request, in virtual seconds."""
    wall_s: float

    def tier(self, name: str = ALL) -> TierFigures:
        """That tier's figures. Raises KeyError if it had no request."""
        for each in self.tiers:
            if each.tier == name:
                return each
        raise KeyError(name)

    @property
    def fragmentation_mean(self) -> float:
        """Over the whole run."""
        return mean(self.fragmentation)

    @property
    def fragmentation_worst(self) -> float:
        """The mean of the worst 300 seconds on end (of all, if there are fewer)."""
        width = min(30, len(self.fragmentation))
        return max((mean(self.fragmentation[at : at + width]) for at in range(len(self.fragmentation) - width + 1)), default=0.0)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> "RunResult":
        """Raises ValueError if it is no such text."""
        return decode(RunResult, json.loads(text))


def result_of(outcome: Outcome) -> RunResult:
    """Sum up."""
    by_tier: dict[str, list[RequestOutcome]] = {ALL: list(outcome.requests)}
    for each in outcome.requests:
        by_tier.setdefault(each.tier, []).append(each)
    samples = outcome.fragmentation
    return RunResult(
        tiers=tuple(TierFigures.of(tier, requests) for tier, requests in sorted(by_tier.items())),
        fragmentation=tuple(round(mean(samples[at : at + _SAMPLES_A_POINT]), 6) for at in range(0, len(samples), _SAMPLES_A_POINT)),
        preemptions=sum(each.preemptions for each in outcome.requests),
        migrations=outcome.migrations,
        instances_mean=outcome.instances_mean,
        duration_s=max(each.arrival_s + each.e2e_s for each in outcome.requests),
        wall_s=outcome.wall_s,
    )
