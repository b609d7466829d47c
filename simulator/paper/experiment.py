"""PURE. What is run: each experiment as a list of scenarios, with the place its result has in tables and pictures.

Rates are in requests a second, chosen so that under `llumnix` the median request hardly queues and the slowest 1 % queue for seconds to
tens of seconds (the criterion of the paper), in runs of 10,000 requests: seconds at the low rate, tens of seconds at the high one.
Shorter runs queue less. Experiments share runs: a run is known by its scenario.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from simulator.scenario import Scenario, from_dict

POLICIES = ("round_robin", "infaas", "llumnix", "midstream")
REAL_TRACES = ("ShareGPT", "BurstGPT")
RATES: dict[str, tuple[float, float, float]] = {
    "ShareGPT": (7.5, 7.75, 7.9),
    "BurstGPT": (7.75, 8.0, 8.25),
    "S-S": (35.0, 39.0, 42.0),
    "M-M": (7.25, 7.5, 7.75),
    "L-L": (2.65, 2.75, 2.8),
    "S-L": (3.5, 3.65, 3.7),
    "L-S": (16.0, 17.5, 18.5),
}
"""Low, middle, high."""

FRAGMENTATION_TRACE = "M-M"
PRIORITY_RATES = {"S-S": 26.0, "ShareGPT": 5.5}
PRIORITY_WEIGHT = 20.0
SCALE_TRACE, SCALE_RATE = "L-L", 2.0
STRESS_INSTANCES, STRESS_TRACE = 64, "64-64"
SCATTER_SEEDS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run. `quick`: fewer rates and variants."""

    seeds: tuple[int, ...] = (1, 2, 3)
    requests: int = 10_000
    quick: bool = False


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One simulation. `panel` is the picture it belongs to, `x` its place there, `series` the line."""

    experiment: str
    panel: str
    x: float
    series: str
    seed: int
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Variant:
    """A line in a picture: a policy, with parameters, and perhaps a rule of scaling."""

    series: str
    policy: dict[str, object]
    autoscale: dict[str, object] | None = None


def traces(plan: Plan) -> Iterable[PaperRun]:
    """Figure 11: latencies of seven traces."""
    for trace, rates in RATES.items():
        for rate in rates[1:2] if plan.quick else rates:
            yield from _runs(plan, "traces", trace, rate, _PLAIN, {"trace": trace, "rate": rate})


def scatter(plan: Plan) -> Iterable[PaperRun]:
    """How sure the ratios at the middle rates are: the first seed and those that follow it. `quick`: nothing."""
    seeds = tuple(range(plan.seeds[0], plan.seeds[0] + SCATTER_SEEDS))
    for trace, rates in () if plan.quick else RATES.items():
        yield from _runs(replace(plan, seeds=seeds), "scatter", trace, rates[1], _PAIR, {"trace": trace, "rate": rates[1]})


def fragmentation(plan: Plan) -> Iterable[PaperRun]:
    """Figure 12: memory that is free and of no use, over time."""
    rate = RATES[FRAGMENTATION_TRACE][1]
    yield from _runs(plan, "fragmentation", FRAGMENTATION_TRACE, rate, _PLAIN, {"trace": FRAGMENTATION_TRACE, "rate": rate})


def priorities(plan: Plan) -> Iterable[PaperRun]:
    """Figure 13: one request in ten is urgent, and arrivals come in bursts."""
    for trace, rate in tuple(PRIORITY_RATES.items())[: 1 if plan.quick else None]:
        for cv in (4.0,) if plan.quick else (2.0, 4.0, 6.0, 8.0):
            yield from _runs(plan, "priorities", trace, cv, _TIERED, {"trace": trace, "rate": rate, "cv": cv, "high_share": 0.1})


def weights(plan: Plan) -> Iterable[PaperRun]:
    """What the weight of urgent requests buys, and what it costs the others."""
    load = {"trace": "S-S", "rate": PRIORITY_RATES["S-S"], "cv": 4.0, "high_share": 0.1}
    for weight in (5.0, 10.0) if plan.quick else (1.0, 2.0, 5.0, 10.0, 20.0, 40.0):
        yield from _runs(plan, "weights", "S-S", weight, (_weighing(weight),), load)
    yield from _runs(plan, "weights", "S-S", 0.0, (_BLIND,), load)


def scaling(plan: Plan) -> Iterable[PaperRun]:
    """Figure 14: as many instances as the load asks for, by rate and by burstiness, and by the time a start takes."""
    for rate in (SCALE_RATE,) if plan.quick else (1.5, SCALE_RATE, 2.25):
        yield from _runs(plan, "scaling", "rate", rate, _SCALED, {"trace": SCALE_TRACE, "rate": rate}, instances=8)
    for cv in (5.0,) if plan.quick else (2.0, 3.5, 5.0):
        yield from _runs(plan, "scaling", "cv", cv, _SCALED, {"trace": SCALE_TRACE, "rate": SCALE_RATE, "cv": cv}, instances=8)
    for start_up_s in () if plan.quick else (0.0, 20.0, 60.0):
        variants = [_starting_in(variant, start_up_s) for variant in _SCALED]
        load = {"trace": SCALE_TRACE, "rate": SCALE_RATE, "cv": 5.0}
        yield from _runs(plan, "scaling", "start-up, s", start_up_s, variants, load, instances=8)


def thresholds(plan: Plan) -> Iterable[PaperRun]:
    """Figure 15: instances paid for against prefill latency, over the rule's threshold. `x` is the threshold."""
    load = {"trace": SCALE_TRACE, "rate": SCALE_RATE, "cv": 5.0}
    for low_tokens in (160.0,) if plan.quick else (40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0):
        rule: dict[str, object] = {"name": "freeness", "low_tokens": low_tokens, "high_tokens": low_tokens + 800.0, "max_instances": 16}
        variants = [Variant(policy, {"name": policy}, rule) for policy in ("infaas", "llumnix")]
        yield from _runs(plan, "thresholds", "cost", low_tokens, variants, load, instances=8)
    for out_share in (0.95,) if plan.quick else (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2):
        rule = {"name": "demand", "out_share": out_share, "in_share": round(out_share - 0.1, 3), "max_instances": 16}
        variant = Variant("midstream", {"name": "midstream"}, rule)
        yield from _runs(plan, "thresholds", "cost", out_share, (variant,), load, instances=8)


def stress(plan: Plan) -> Iterable[PaperRun]:
    """Figure 16: 64 instances, short requests, a rising rate."""
    variants = [Variant(name, {"name": name}) for name in ("llumnix", "midstream")]
    for rate in (400.0, 800.0) if plan.quick else (200.0, 400.0, 600.0, 800.0, 1000.0):
        yield from _runs(plan, "stress", STRESS_TRACE, rate, variants, {"trace": STRESS_TRACE, "rate": rate}, instances=STRESS_INSTANCES)


EXPERIMENTS = {
    "traces": traces,
    "scatter": scatter,
    "fragmentation": fragmentation,
    "priorities": priorities,
    "weights": weights,
    "scaling": scaling,
    "thresholds": thresholds,
    "stress": stress,
}
"""By name, in the order of the page."""


def _weighing(weight: float) -> Variant:
    return Variant("midstream", {"name": "midstream", "weights": {"high": weight}})


_PLAIN = [Variant(name, {"name": name, "priorities": False}) for name in POLICIES]
_PAIR = [variant for variant in _PLAIN if variant.series in ("llumnix", "midstream")]
_BLIND = Variant("llumnix, blind", {"name": "llumnix", "priorities": False})
_HEAD_ROOM = Variant("llumnix, head-room", {"name": "llumnix", "targets": {"high": 1600}})
_TIERED = (_BLIND, _HEAD_ROOM, _weighing(PRIORITY_WEIGHT))
_RANGE: dict[str, object] = {"name": "freeness", "max_instances": 16}
_DEMAND: dict[str, object] = {"name": "demand", "max_instances": 16}
_SCALED = (
    Variant("infaas", {"name": "infaas"}, _RANGE),
    Variant("llumnix", {"name": "llumnix"}, _RANGE),
    Variant("midstream", {"name": "midstream"}, _DEMAND),
)


def _starting_in(variant: Variant, start_up_s: float) -> Variant:
    assert variant.autoscale is not None
    return Variant(variant.series, variant.policy, {**variant.autoscale, "start_up_s": start_up_s})


def _runs(
    plan: Plan, experiment: str, panel: str, x: float, variants: Sequence[Variant], load: dict[str, object], *, instances: int = 16
) -> Iterable[PaperRun]:
    for variant in variants:
        for seed in plan.seeds:
            raw: dict[str, object] = {
                "workload": {**load, "requests": plan.requests, "seed": seed},
                "cluster": {"instances": instances},
                "policy": variant.policy,
            }
            if variant.autoscale is not None:
                raw["autoscale"] = variant.autoscale
            yield PaperRun(experiment, panel, x, variant.series, seed, from_dict(raw))
