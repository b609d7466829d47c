"""PURE. A scenario's cluster as it is, not as it is thought to be: how many instances a gateway lists, their memory and limits, and what
their engines have measured of their own steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from backend.registry.instance import StepCost
from simulator.outcome import mean
from simulator.scenario import CostConfig, Scenario, ScenarioError


@dataclass(frozen=True, slots=True)
class Listed:
    """What is read of an instance in the answer of GET /admin/instances."""

    id: str
    state: str
    capacity_tokens: int
    block_tokens: int
    max_batch: int
    cost: StepCost


@dataclass(frozen=True, slots=True)
class _Answer:
    instances: list[Listed]


def as_measured(scenario: Scenario, answer: bytes, time_scale: float) -> Scenario:
    """The scenario with the cluster that `answer`, of GET /admin/instances, lists: those that are ready, all taken to be like their mean;
    their measured times divided by `time_scale`. What no engine reports (its way with prompts, its watermark, what a migration takes)
    stays as the scenario says.

    Raises ScenarioError if the answer is none, if nobody is ready, if they differ in their blocks, or if one has measured nothing yet.
    """
    try:
        listed = TypeAdapter(_Answer).validate_json(answer).instances
    except ValidationError as error:
        raise ScenarioError(f"no list of instances: {error.errors()[0]['msg']}") from error
    ready = [each for each in listed if each.state == "ready"]
    if not ready:
        raise ScenarioError("no instance is ready")
    unknown = [each.id for each in ready if not (each.cost.base_s and each.cost.prefill_tokens_per_s and each.block_tokens)]
    if unknown:
        raise ScenarioError(f"these instances have measured no steps yet: {', '.join(unknown)}")
    if len({each.block_tokens for each in ready}) > 1:
        raise ScenarioError("the instances' blocks are not of one size")
    cluster = replace(
        scenario.cluster,
        instances=len(ready),
        block_tokens=ready[0].block_tokens,
        capacity_blocks=round(mean([each.capacity_tokens / each.block_tokens for each in ready])),
        max_batch=min(each.max_batch for each in ready),
    )
    return replace(scenario, cluster=cluster, cost=_cost(scenario.cost, [each.cost for each in ready], time_scale))


def _cost(known: CostConfig, measured: Sequence[StepCost], time_scale: float) -> CostConfig:
    def usual_s(of: Callable[[StepCost], float]) -> float:
        return mean([of(each) for each in measured]) / time_scale

    return replace(
        known,
        decode_base_s=usual_s(lambda cost: cost.base_s),
        decode_per_token_s=usual_s(lambda cost: cost.per_token_s),
        decode_per_request_s=usual_s(lambda cost: cost.per_request_s),
        prefill_base_s=usual_s(lambda cost: cost.prefill_base_s),
        prefill_per_token_s=usual_s(lambda cost: 1 / cost.prefill_tokens_per_s),
        prefill_per_token2_s=usual_s(lambda cost: cost.prefill_per_token2_s),
    )
