"""The instances as this gateway last saw them, as gauges made at each scrape: those that have left are gone from them at once."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.policy.load import rebalance_freeness
from gateway.policy.view import ClusterView, InstanceView

_GAUGES: tuple[tuple[str, str, Callable[[InstanceView], float]], ...] = (
    ("freeness", "Free tokens per running request, once the queue's head has its own.", lambda view: rebalance_freeness(view, {})),
    ("capacity_tokens", "KV memory in tokens.", lambda view: view.report.capacity_tokens),
    ("free_tokens", "Free KV memory in tokens.", lambda view: view.report.free_tokens),
    ("running", "Requests in its batch.", lambda view: view.report.running),
    ("waiting", "Requests in its queue.", lambda view: view.report.waiting),
    ("waiting_tokens", "KV memory that its queue needs, in tokens.", lambda view: view.report.waiting_tokens),
    ("oldest_waiting_seconds", "Age of the oldest request in its queue.", lambda view: view.report.oldest_waiting_s),
    ("claims", "Live requests on it, of all gateways.", lambda view: view.claims),
    ("migrations_in", "Requests arriving there.", lambda view: view.report.migrations_in),
    ("migrations_out", "Requests leaving it.", lambda view: view.report.migrations_out),
    ("decode_step_seconds", "Its last pure decode step.", lambda view: view.report.cost.last_step_s),
    ("prefill_tokens_per_second", "Its measured prefill rate.", lambda view: view.report.cost.prefill_tokens_per_s),
    ("report_age_seconds", "Age of its last report.", lambda view: view.age_s),
)  # fmt: skip


class ClusterCollector(Collector):
    """Reads the last view; keeps nothing, so that it works beside the files of several processes too."""

    def __init__(self, prefix: str, view: Callable[[], ClusterView]) -> None:
        self._prefix = f"{prefix}_instance"
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Names are known without a view."""
        return ()

    def collect(self) -> Iterator[Metric]:
        views = self._view().instances
        for name, meaning, value in _GAUGES:
            gauge = GaugeMetricFamily(f"{self._prefix}_{name}", meaning, labels=["instance"])
            for view in views:
                gauge.add_metric([view.id], value(view))
            yield gauge
        preemptions = CounterMetricFamily(f"{self._prefix}_preemptions", "Requests it has taken the memory from.", labels=["instance"])
        states = GaugeMetricFamily(f"{self._prefix}_state", "1 for the state it is in.", labels=["instance", "state"])
        tiers = GaugeMetricFamily(f"{self._prefix}_tier_running", "Requests in its batch by tier.", labels=["instance", "tier"])
        for view in views:
            preemptions.add_metric([view.id], view.report.preemptions)
            states.add_metric([view.id, view.state.value], 1)
            for tier, load in view.report.tiers:
                tiers.add_metric([view.id, tier], load.running)
        yield from (preemptions, states, tiers)
