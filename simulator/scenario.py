"""What is simulated, read from TOML. An unknown key, a wrong type or a value out of range is a ScenarioError that names the key."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from backend.engine.shape import CostModel, EngineShape, PrefillStyle
from gateway.policy.autoscale import Fixed
from gateway.policy.config import MidstreamPolicy, PolicyConfig, ScaleConfig

Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the culprit."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The instances, all alike. The defaults are the paper's: 16 A10 with LLaMA-7B, the engine of 2023."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    instances: Count = 16
    capacity_blocks: Count = 851
    block_tokens: Count = 16
    watermark: Share = 0.01
    max_batch: Count = 256
    max_prefill_tokens: Count = 12_800
    prefill: Literal["first", "chunked"] = "first"


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Step times and migrations, in seconds. The defaults: LLaMA-7B, fp16, on an A10, with 64 Gb/s between machines used to one half."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    decode_base_s: NotNegative = 0.024
    decode_per_token_s: NotNegative = 3.5e-6
    decode_per_request_s: NotNegative = 0.15e-3
    prefill_base_s: NotNegative = 0.005
    prefill_per_token_s: NotNegative = 14e9 / 62e12
    prefill_per_token2_s: NotNegative = 2 * 4096 * 32 / 40e12
    kv_bytes_per_token: Count = 524_288
    migration_bytes_per_s: Positive = 4e9
    migration_downtime_s: NotNegative = 0.025
    migration_slowdown: NotNegative = 0.01


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """A trace by name, or a file of arrivals (`file`, which needs no rate)."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    trace: Literal["ShareGPT", "BurstGPT", "S-S", "M-M", "L-L", "S-L", "L-S", "64-64"] | None = None
    file: str | None = None
    rate: Positive | None = None
    cv: Positive = 1.0
    requests: Count = 10_000
    seed: int = 1
    high_share: Annotated[float, Field(ge=0, le=1)] = 0.0


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """How the number of instances changes. `start_up_s` is how long a new one takes to be ready."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rule: ScaleConfig = field(default_factory=Fixed)
    interval_s: Positive = 2.0
    start_up_s: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    workload: WorkloadConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    policy: PolicyConfig = field(default_factory=MidstreamPolicy)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    def shape(self) -> EngineShape:
        """Each engine's limits and costs."""
        cluster, cost = self.cluster, self.cost
        return EngineShape(
            capacity_blocks=cluster.capacity_blocks,
            block_tokens=cluster.block_tokens,
            watermark=cluster.watermark,
            max_batch=cluster.max_batch,
            max_prefill_tokens=cluster.max_prefill_tokens,
            max_model_tokens=cluster.capacity_blocks * cluster.block_tokens,
            style=PrefillStyle(cluster.prefill),
            cost=CostModel(
                decode_base_s=cost.decode_base_s,
                decode_per_token_s=cost.decode_per_token_s,
                decode_per_request_s=cost.decode_per_request_s,
                prefill_base_s=cost.prefill_base_s,
                prefill_per_token_s=cost.prefill_per_token_s,
                prefill_per_token2_s=cost.prefill_per_token2_s,
            ),
        )


def parse(text: str) -> Scenario:
    """Raises ScenarioError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"not TOML: {error}") from error
    return from_dict(raw)


def from_dict(raw: dict[str, object]) -> Scenario:
    """The same from nested dictionaries, sections and keys as in TOML. Raises ScenarioError."""
    try:
        scenario = adapter().validate_python(_shaped(raw))
    except ValidationError as error:
        raise ScenarioError("; ".join(_complaint(dict(each)) for each in error.errors())) from error
    _check(scenario)
    return scenario


@cache
def adapter() -> TypeAdapter[Scenario]:
    """Scenarios to and from plain values. (It takes a while to make.)"""
    return TypeAdapter(Scenario)


def policy_named(name: str) -> PolicyConfig:
    """That policy with its defaults. Raises ScenarioError."""
    try:
        policy: PolicyConfig = TypeAdapter(PolicyConfig).validate_python({"name": name})
    except ValidationError as error:
        raise ScenarioError(f"there is no policy '{name}'") from error
    return policy


def _shaped(raw: dict[str, object]) -> dict[str, object]:
    """[policy] without a name is Midstream's; in [autoscale] the rule's own keys stand beside the section's."""
    shaped = dict(raw)
    policy = raw.get("policy")
    if isinstance(policy, dict):
        shaped["policy"] = {"name": "midstream", **policy}
    autoscale = raw.get("autoscale")
    if isinstance(autoscale, dict):
        common = {key: value for key, value in autoscale.items() if key in ("interval_s", "start_up_s")}
        rule = {"name": "fixed", **{key: value for key, value in autoscale.items() if key != "interval_s"}}
        if rule["name"] != "demand":
            rule.pop("start_up_s", None)
        shaped["autoscale"] = {**common, "rule": rule}
    return shaped


def _complaint(error: dict[str, object]) -> str:
    """One of pydantic's complaints, with the key as it stands in the file."""
    location = error["loc"]
    assert isinstance(location, tuple)
    tags = ("rule", "round_robin", "least_outstanding", "infaas", "llumnix", "midstream", "fixed", "freeness", "demand")
    key = ".".join(str(part) for part in location if part not in tags)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown key '{key}'"
    if error["type"] == "union_tag_invalid":
        key += ".name"
    return f"'{key}': {str(error['msg'])[:1].lower()}{str(error['msg'])[1:]}"


def _check(scenario: Scenario) -> None:
    """What no single key can say."""
    workload = scenario.workload
    if (workload.trace is None) == (workload.file is None):
        raise ScenarioError("'workload': give either 'trace' or 'file'")
    if workload.trace is not None and workload.rate is None:
        raise ScenarioError("'workload.rate' is missing: requests a second")
