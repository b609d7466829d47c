"""Instances that could not be reached a moment ago: used only if there is no other."""

from collections.abc import Callable

from gateway.policy.dispatch import is_served
from gateway.policy.view import ClusterView, RequestView
from migration.leg import InstanceId


class Suspects:
    """Owned by the app. `hold_s` is how long a suspicion lasts."""

    def __init__(self, clock: Callable[[], float], hold_s: float) -> None:
        self._clock = clock
        self._hold_s = hold_s
        self._until_s: dict[InstanceId, float] = {}

    def add(self, instance: InstanceId) -> None:
        """It could not be reached just now."""
        self._until_s[instance] = self._clock() + self._hold_s

    def drop(self, instance: InstanceId) -> None:
        """It is above suspicion again."""
        self._until_s.pop(instance, None)

    def without(self, cluster: ClusterView, request: RequestView) -> ClusterView:
        """The cluster as far as it is above suspicion; all of it if nobody else can take the request."""
        if not self._until_s:
            return cluster
        now_s = self._clock()
        self._until_s = {instance: until_s for instance, until_s in self._until_s.items() if until_s > now_s}
        careful = cluster.without(self._until_s.keys()) if self._until_s else cluster
        return careful if is_served(request, careful) else cluster
