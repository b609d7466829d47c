"""PURE. Which instances a scale-in takes: those with fewest tokens in use and waiting; of these the newest."""

from collections.abc import Iterable, Sequence

from gateway.policy.load import unseen
from gateway.policy.view import ClusterView, InstanceView, ViewState
from gateway.scaling.launcher import Launched
from migration.leg import InstanceId


def choose_departures(cluster: ClusterView, launched: Iterable[Launched], busy: frozenset[InstanceId], count: int) -> Sequence[InstanceId]:
    """At most `count`, best first. Only what the launcher can stop now and what no operation is at work on."""
    orders = {each.instance: each.order for each in launched if each.stoppable}
    free = [
        view for view in cluster.instances if view.id in orders and view.id not in busy and view.state in (ViewState.READY, ViewState.STALE)
    ]
    free.sort(key=lambda view: (tokens_on(view), -orders[view.id]))
    return [view.id for view in free[:count]]


def tokens_on(view: InstanceView) -> int:
    """Context tokens that live there or are on their way."""
    report = view.report
    return report.capacity_tokens - report.free_tokens + report.waiting_tokens + unseen(view)[1]
