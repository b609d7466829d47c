"""PURE. How many instances there should be. One decision at a time; launches under way count as instances.

FreenessRange (Llumnix): start one when the mean freeness has been below `low_tokens` for `hold_s`; drain the instance with the fewest
running requests when it has been above `high_tokens` as long.

DemandScaling: D is the memory in use and waited for everywhere, n counts active and starting instances of capacity C.
Out when D' > out_share * C * n, D' being D with its trend over the start-up time: drains are cancelled and what is missing is started at
once. In when nothing starts or drains, `cool_down_s` have passed since the last change, and D' < in_share * C * (n - 1): the instance with
least in use and waiting is drained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, Protocol

from pydantic import ConfigDict

from gateway.policy.load import scale_freeness
from gateway.policy.view import ClusterView, InstanceView, ViewState
from migration.leg import InstanceId


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """Start so many, end these drains, drain these."""

    start: int = 0
    undrain: tuple[InstanceId, ...] = ()
    drain: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaleView:
    """What a rule looks at. `line_tokens` wait in the gateways' line; `since` and `demand_before` are its own earlier observations."""

    cluster: ClusterView
    now_s: float
    line_tokens: int
    memory: "ScaleMemory"


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What a rule remembers from one look to the next."""

    changed_s: float = float("-inf")
    low_since_s: float | None = None
    high_since_s: float | None = None
    demand: tuple[tuple[float, float], ...] = ()
    """(when, demand in tokens) of late, oldest first."""


class ScaleRule(Protocol):
    """The shape of every rule."""

    def decide(self, view: ScaleView) -> tuple[ScaleDecision, ScaleMemory]:
        """What to do now, and what to hand in next time."""


@dataclass(frozen=True, slots=True)
class FreenessRange:
    """See above."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["freeness"] = "freeness"
    min_instances: int = 1
    max_instances: int = 16
    low_tokens: float = 160.0
    high_tokens: float = 960.0
    hold_s: float = 10.0

    def decide(self, view: ScaleView) -> tuple[ScaleDecision, ScaleMemory]:
        active, starting, draining = _split(view.cluster)
        freeness = scale_freeness(active)
        was = view.memory
        low_since_s = _since(was.low_since_s, freeness < self.low_tokens, view.now_s)
        high_since_s = _since(was.high_since_s, freeness > self.high_tokens, view.now_s)
        decision = ScaleDecision()
        if low_since_s is not None and view.now_s - low_since_s >= self.hold_s and not starting:
            if draining:
                decision = ScaleDecision(undrain=(_fullest(draining),))
            elif len(active) < self.max_instances:
                decision = ScaleDecision(start=1)
        elif high_since_s is not None and view.now_s - high_since_s >= self.hold_s and self._may_shrink(active, starting, draining):
            decision = ScaleDecision(drain=(min(active, key=lambda each: (each.report.running, each.id)).id,))
        if decision != ScaleDecision():
            return decision, ScaleMemory(changed_s=view.now_s)
        return decision, ScaleMemory(was.changed_s, low_since_s, high_since_s)

    def _may_shrink(self, active: Sequence[InstanceView], starting: Sequence[InstanceView], draining: Sequence[InstanceView]) -> bool:
        return not starting and not draining and len(active) > self.min_instances


@dataclass(frozen=True, slots=True)
class DemandScaling:
    """See above. `start_up_s` is how long a start takes, and how far the trend is prolonged."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["demand"] = "demand"
    min_instances: int = 1
    max_instances: int = 16
    out_share: float = 0.95
    in_share: float = 0.85
    cool_down_s: float = 10.0
    start_up_s: float = 0.0
    trend_window_s: float = 20.0

    def decide(self, view: ScaleView) -> tuple[ScaleDecision, ScaleMemory]:
        active, starting, draining = _split(view.cluster)
        demand = float(view.line_tokens + sum(_in_use(each) for each in view.cluster.instances))
        history = tuple(each for each in view.memory.demand if view.now_s - each[0] <= self.trend_window_s)
        foreseen = demand + self._trend(history, demand, view.now_s) * self.start_up_s
        memory = ScaleMemory(view.memory.changed_s, demand=(*history, (view.now_s, demand)))
        count = len(active) + len(starting)
        capacity = max((each.report.capacity_tokens for each in view.cluster.instances), default=0)
        if not capacity:
            return ScaleDecision(start=max(0, self.min_instances - count)), memory
        wanted = min(self.max_instances, max(self.min_instances, ceil(foreseen / (self.out_share * capacity))))
        if wanted > count:
            back = tuple(each.id for each in sorted(draining, key=lambda each: (-_in_use(each), each.id)))[: wanted - count]
            start = max(0, min(wanted, self.max_instances) - count - len(draining))
            return ScaleDecision(start=start, undrain=back), ScaleMemory(view.now_s, demand=memory.demand)
        rested = view.now_s - view.memory.changed_s >= self.cool_down_s
        if rested and not starting and not draining and count > self.min_instances and foreseen < self.in_share * capacity * (count - 1):
            emptiest = min(active, key=lambda each: (_in_use(each), each.id))
            return ScaleDecision(drain=(emptiest.id,)), ScaleMemory(view.now_s, demand=memory.demand)
        return ScaleDecision(), memory

    @staticmethod
    def _trend(history: Sequence[tuple[float, float]], demand: float, now_s: float) -> float:
        """Tokens a second, from the oldest observation to now; only growth counts."""
        if not history or history[0][0] >= now_s:
            return 0.0
        return max(0.0, (demand - history[0][1]) / (now_s - history[0][0]))


@dataclass(frozen=True, slots=True)
class Fixed:
    """As many as there are."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Literal["fixed"] = "fixed"
    memory: ScaleMemory = field(default_factory=ScaleMemory)

    def decide(self, view: ScaleView) -> tuple[ScaleDecision, ScaleMemory]:
        return ScaleDecision(), view.memory


def _split(cluster: ClusterView) -> tuple[list[InstanceView], list[InstanceView], list[InstanceView]]:
    """Active, starting and draining ones."""
    states = ((ViewState.READY, ViewState.STALE), (ViewState.STARTING,), (ViewState.DRAINING,))
    active, starting, draining = ([each for each in cluster.instances if each.state in group] for group in states)
    return active, starting, draining


def _in_use(view: InstanceView) -> int:
    report = view.report
    return report.capacity_tokens - report.free_tokens + report.waiting_tokens


def _fullest(views: Sequence[InstanceView]) -> InstanceId:
    return max(views, key=lambda each: (_in_use(each), each.id)).id


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s
