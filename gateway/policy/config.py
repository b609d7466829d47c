"""PURE. Policies by name: tagged values, as settings and scenario files hold them, and what each is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gateway.policy.autoscale import DemandScaling, Fixed, FreenessRange
from gateway.policy.dispatch import Cheapest, DispatchPolicy, Freest, LeastLoaded, LeastMemory, RoundRobin
from gateway.policy.line import Immediate, LateBinding, LinePolicy
from gateway.policy.rebalance import FreenessPairing, PriceStep, QueueStep, ReleaseStep
from gateway.policy.tier import Tier, Tiers


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """How requests are moved. `pairing`, `price`, `queue` or `release` None: not for that reason."""

    pairing: FreenessPairing | None = None
    price: PriceStep | None = None
    queue: QueueStep | None = None
    release: ReleaseStep | None = None
    interval_s: float = 0.2
    cool_down_s: float = 0.0
    """A request that has moved stays for so long."""
    moves_per_instance_s: float = 0.0
    """Moves that begin a second, at most, for each instance of the cluster; 0: no bound."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that decides. `dispatch` is for shells without a line. `ranked`: urgent tiers come first in every queue."""

    dispatch: DispatchPolicy
    line: LinePolicy
    rebalancing: Rebalancing
    tiers: Tiers
    ranked: bool = True

    def rank_of(self, tier: str) -> int:
        """What orders requests of that tier in every queue, lower first; 0 for all if tiers do not count."""
        return self.tiers.find(tier).rank if self.ranked else 0


def _immediate(dispatch: DispatchPolicy, rebalancing: Rebalancing, tiers: Tiers, ranked: bool) -> Policy:
    return Policy(dispatch, Immediate(dispatch), rebalancing, tiers, ranked)


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """Each instance in turn; nothing moves."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["round_robin"] = "round_robin"
    priorities: bool = True

    def build(self, tiers: Tiers) -> Policy:
        return _immediate(RoundRobin(), Rebalancing(), tiers, self.priorities)


@dataclass(frozen=True, slots=True)
class LeastOutstandingPolicy:
    """Fewest requests; nothing moves."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["least_outstanding"] = "least_outstanding"
    priorities: bool = True

    def build(self, tiers: Tiers) -> Policy:
        return _immediate(LeastLoaded(), Rebalancing(), tiers, self.priorities)


@dataclass(frozen=True, slots=True)
class InfaasPolicy:
    """Least memory in use or waited for; nothing moves."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["infaas"] = "infaas"
    priorities: bool = True

    def build(self, tiers: Tiers) -> Policy:
        return _immediate(LeastMemory(), Rebalancing(), tiers, self.priorities)


@dataclass(frozen=True, slots=True)
class LlumnixPolicy:
    """As published: to the freest, at once; freeness pairing moves requests. `targets` gives tiers head-room, see load.py."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["llumnix"] = "llumnix"
    priorities: bool = True
    migrate: bool = True
    out_tokens: float = 48.0
    in_tokens: float = 48.0
    interval_s: Annotated[float, Field(gt=0)] = 0.2
    targets: Mapping[str, int] = field(default_factory=dict)

    def build(self, tiers: Tiers) -> Policy:
        pairing = FreenessPairing(self.out_tokens, self.in_tokens, self.targets) if self.migrate else None
        return _immediate(Freest(targets=self.targets), Rebalancing(pairing, interval_s=self.interval_s), tiers, self.priorities)


@dataclass(frozen=True, slots=True)
class MidstreamPolicy:
    """The default: late binding with backfill, priced placement, moves for memory and for price. `weights` replaces tiers' weights.

    Without `priorities` every request weighs the same."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["midstream"] = "midstream"
    priorities: bool = True
    late_binding: bool = True
    backfill: bool = True
    placement: Literal["price", "freeness"] = "price"
    growth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    ahead: Annotated[int, Field(ge=0)] = 1
    age_step_s: Annotated[float, Field(ge=0)] = 20.0
    aged_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    stand_back_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    migrate: bool = True
    price_moves: bool = True
    out_tokens: float = 48.0
    in_tokens: float = 24.0
    unblock_tokens: float = 8.0
    interval_s: Annotated[float, Field(gt=0)] = 0.2
    threshold_s: Annotated[float, Field(ge=0)] = 0.005
    keep_blocks: Annotated[int, Field(ge=0)] = 10
    cool_down_s: Annotated[float, Field(ge=0)] = 0.0
    requeue: bool = True
    release: bool = True
    release_tokens: Annotated[int, Field(ge=0)] = 256
    moves_per_instance_s: Annotated[float, Field(ge=0)] = 5.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def build(self, tiers: Tiers) -> Policy:
        weighed = replace(tiers, tiers=tuple(replace(each, weight=self._weight(each)) for each in tiers.tiers))
        dispatch = Cheapest(tiers=weighed)
        line: LinePolicy = Immediate(dispatch)
        if self.late_binding:
            line = LateBinding(
                weighed,
                self.growth,
                self.ahead,
                self.age_step_s,
                self.aged_share,
                self.stand_back_s,
                self.backfill,
                self.placement,
                self.unblock_tokens if self.migrate else None,
            )
        moves = Rebalancing(
            FreenessPairing(self.out_tokens, self.in_tokens, unblock_tokens=self.unblock_tokens) if self.migrate else None,
            PriceStep(weighed, self.threshold_s, self.keep_blocks) if self.migrate and self.price_moves else None,
            QueueStep() if self.migrate and self.requeue else None,
            ReleaseStep(self.release_tokens) if self.migrate and self.release and self.late_binding else None,
            self.interval_s,
            self.cool_down_s,
            self.moves_per_instance_s,
        )
        return Policy(dispatch, line, moves, weighed, self.priorities)

    def _weight(self, tier: Tier) -> float:
        return self.weights.get(tier.name, tier.weight) if self.priorities else 1.0


PolicyConfig: TypeAlias = Annotated[
    RoundRobinPolicy | LeastOutstandingPolicy | InfaasPolicy | LlumnixPolicy | MidstreamPolicy, Field(discriminator="name")
]

ScaleConfig: TypeAlias = Annotated[Fixed | FreenessRange | DemandScaling, Field(discriminator="name")]

POLICIES = ("midstream", "llumnix", "infaas", "least_outstanding", "round_robin")


def policy_config(name: str, options: Mapping[str, object]) -> PolicyConfig:
    """That policy with these parameters. Raises ValueError that names what is wrong."""
    if name not in POLICIES:
        raise ValueError(f"there is no policy '{name}'; known: {', '.join(POLICIES)}")
    try:
        config: PolicyConfig = TypeAdapter(PolicyConfig).validate_python({**options, "name": name})
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(name, each["loc"], each["type"], each["msg"]) for each in error.errors())) from None
    return config


def _complaint(name: str, location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in location if part != name)
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"policy '{name}' has no parameter '{key}'"
    return f"policy '{name}', '{key}': {message[:1].lower()}{message[1:]}"
