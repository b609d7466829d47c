"""PURE. A scenario played live beside the same scenario simulated: what fake engines must be told to be the scenario's, and how far the
two are apart.

Live times are divided by the time scale, so that both sides are in the scenario's seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.outcome import Outcome, Spread
from simulator.scenario import Scenario

TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as its client saw it, in live seconds. `tpot_s` is None if there were not two moments to measure between."""

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """One mean, live and simulated."""

    figure: str
    live_s: float
    simulated_s: float

    @property
    def deviation(self) -> float:
        """Of the simulated from the live one, as a share; inf if there was nothing live."""
        return (self.simulated_s - self.live_s) / self.live_s if self.live_s > 0 else float("inf")

    def within(self, tolerance: float = TOLERANCE) -> bool:
        """True if the two agree."""
        return abs(self.deviation) <= tolerance


def agreements(measured: Sequence[Measured | None], time_scale: float, simulated: Outcome) -> list[Agreement]:
    """Means of time to first token, time per further token, and end to end, over the requests that were answered live: both sides are in
    the order of arrival, with None for one that was not. Raises ValueError if they are not equally many."""
    pairs = [(live, virtual) for live, virtual in zip(measured, simulated.requests, strict=True) if live is not None]
    paced = [(live.tpot_s, virtual.tpot_s) for live, virtual in pairs if live.tpot_s is not None and virtual.tpot_s is not None]
    scaled = (
        ("TTFT", [live.ttft_s for live, _ in pairs], [virtual.ttft_s for _, virtual in pairs]),
        ("TPOT", [live for live, _ in paced], [virtual for _, virtual in paced]),
        ("end to end", [live.e2e_s for live, _ in pairs], [virtual.e2e_s for _, virtual in pairs]),
    )
    return [Agreement(name, Spread.of(live).mean / time_scale, Spread.of(virtual).mean) for name, live, virtual in scaled]


def table(rows: Sequence[Agreement]) -> str:
    """For people: which agree, and which do not."""
    lines = [f"{'mean, s':14}{'live':>10}{'simulated':>11}{'deviation':>11}"]
    for row in rows:
        verdict = "" if row.within() else f"not within {100 * TOLERANCE:.0f} %"
        lines.append(f"{row.figure:14}{row.live_s:10.4f}{row.simulated_s:11.4f}{100 * row.deviation:+9.1f} %  {verdict}".rstrip())
    return "\n".join(lines)


def engine_environment(scenario: Scenario, time_scale: float) -> Mapping[str, str]:
    """The environment in which a fake engine is one of the scenario's, its time `time_scale` times as slow."""
    cluster, cost = scenario.cluster, scenario.cost
    values: dict[str, object] = {
        "capacity_blocks": cluster.capacity_blocks,
        "block_tokens": cluster.block_tokens,
        "kv_bytes_per_block": 16 * cluster.block_tokens,
        "prefix_cache": "false",
        "watermark": cluster.watermark,
        "style": cluster.prefill,
        "max_batch": cluster.max_batch,
        "max_prefill_tokens": cluster.max_prefill_tokens,
        "max_model_tokens": cluster.capacity_blocks * cluster.block_tokens,
        "decode_base_s": cost.decode_base_s,
        "decode_per_token_s": cost.decode_per_token_s,
        "decode_per_request_s": cost.decode_per_request_s,
        "prefill_base_s": cost.prefill_base_s,
        "prefill_per_token_s": cost.prefill_per_token_s,
        "prefill_per_token2_s": cost.prefill_per_token2_s,
        "time_scale": time_scale,
    }
    return {f"MIDSTREAM_FAKE_{name.upper()}": str(value) for name, value in values.items()}
