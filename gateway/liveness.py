"""PURE. When an instance that keeps its connection open, and says nothing, counts as dead.

Silence alone proves little: a long prefill is silent, too. So its reports must have stopped as well, while those of others come in.
"""

from gateway.policy.view import ClusterView
from migration.leg import InstanceId

STEPS = 20.0
"""Of its own measured steps, that an instance may be silent for in any case."""
TIER_FACTORS = {"high": 0.5, "normal": 1.0, "batch": 2.0}


def patience_s(tier: str, hang_timeout_s: float, step_s: float) -> float:
    """Seconds without an event after which it is worth looking at the instance's reports."""
    return max(hang_timeout_s * TIER_FACTORS.get(tier, 1.0), STEPS * step_s)


def is_hung(instance: InstanceId, silent_s: float, tier: str, cluster: ClusterView, hang_timeout_s: float, report_stale_s: float) -> bool:
    """Whether it counts as dead. Never if no other instance reports either: then it is the store that fails, or its clock."""
    view = cluster.find(instance)
    step_s = view.report.cost.last_step_s if view is not None else 0.0
    if silent_s < patience_s(tier, hang_timeout_s, step_s):
        return False
    if view is not None and view.age_s <= report_stale_s:
        return False
    return any(other.age_s <= report_stale_s for other in cluster.instances if other.id != instance)
