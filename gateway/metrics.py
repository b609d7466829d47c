"""Every metric of the gateway, once. The registry is passed in: two gateways in one process do not share one.

Several gateway processes of one machine may share a directory of prometheus-client (PROMETHEUS_MULTIPROC_DIR): then each tells the sums of
all of them, but for the instances, which each sees for itself.
"""

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.cluster_metrics import ClusterCollector
from gateway.line_metrics import LineMetrics
from gateway.move_metrics import MoveMetrics
from gateway.policy.view import ClusterView
from gateway.resume_metrics import ResumeMetrics
from gateway.scale_metrics import ScaleMetrics
from gateway.timing import Timings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_DISPATCH_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


PREFIX = "midstream_gateway"
MAX_NAMES = 256
"""Instances that are counted by name, at most; the others are `other`."""


class Metrics:
    """Counts what one gateway does. No label's values grow with requests, or with instances that have left.

    `shared_dir` is the directory that prometheus-client was told to use, if it was.
    """

    def __init__(self, registry: CollectorRegistry, shared_dir: str | None = None) -> None:
        self.registry = registry
        self._shared_dir = shared_dir
        self._cluster: ClusterCollector | None = None
        self._named: set[tuple[str, str]] = set()
        prefix = PREFIX
        self.timings = Timings(registry, prefix)
        self.labelled = self.timings.labelled
        self.requests = Counter(
            f"{prefix}_requests", "Requests that are over, by tier and outcome ('ok' or a reason).", ["tier", "outcome"], registry=registry
        )
        self.live = Gauge(f"{prefix}_live_requests", "Requests being served.", registry=registry, multiprocess_mode="livesum")
        self.first_byte_s = Histogram(
            f"{prefix}_first_byte_seconds", "Arrival to first byte at the client.", ["tier"], buckets=_SECONDS, registry=registry
        )
        self.duration_s = Histogram(f"{prefix}_request_seconds", "Arrival to end.", ["tier"], buckets=_SECONDS, registry=registry)
        self.retries = Counter(
            f"{prefix}_retries", "Attempts given up for another instance, unseen by the client.", ["reason"], registry=registry
        )
        self.broken_streams = Counter(
            f"{prefix}_broken_answers", "Answers that failed after their first byte.", ["reason"], registry=registry
        )
        self.switches = Counter(f"{prefix}_switches", "Streams that went on at another instance.", registry=registry)
        self.switch_gap_s = Histogram(
            f"{prefix}_switch_gap_seconds", "Last event before a switch to first after it.", buckets=_GAP_SECONDS, registry=registry
        )
        self.moves = MoveMetrics(registry, prefix)
        self.decisions = Counter(
            f"{prefix}_decisions", "Decisions by kind and by the instance that was chosen.", ["kind", "instance"], registry=registry
        )
        self.line = LineMetrics(registry, prefix)
        self.resumes = ResumeMetrics(registry, prefix)
        self.scaling = ScaleMetrics(registry, prefix)
        self.dispatch_s = Histogram(
            f"{prefix}_dispatch_seconds",
            "One look at the cluster, decision and claim included.",
            buckets=_DISPATCH_SECONDS,
            registry=registry,
        )
        self.leading = Gauge(
            f"{prefix}_rebalancing",
            "1 while this gateway holds the lease of rebalancing.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.conflicts = Counter(f"{prefix}_claim_conflicts", "Claims lost to another gateway's, and chosen anew.", registry=registry)
        self.store_errors = Counter(f"{prefix}_store_errors", "Questions the store did not answer.", registry=registry)
        self.store_up = Gauge(f"{prefix}_store_up", "1 while the store answers.", registry=registry, multiprocess_mode="livemin")
        self.store_up.set(1)

    def show_cluster(self, view: Callable[[], ClusterView]) -> None:
        """Tell of the instances of that view from now on."""
        self._cluster = ClusterCollector(PREFIX, view)

    def note_decision(self, kind: str, instance: str) -> None:
        """A decision has chosen that instance."""
        name = instance if (kind, instance) in self._named or len(self._named) < MAX_NAMES else "other"
        self._named.add((kind, name))
        self.decisions.labels(kind, name).inc()

    def forget_others(self, instances: Collection[str]) -> None:
        """Drop what is counted for instances that have left. (Files that processes share cannot drop anything.)"""
        gone = {each for each in self._named if each[1] not in instances and each[1] != "other"}
        if self._shared_dir is None:
            for kind, name in gone:
                self.decisions.remove(kind, name)
            self._named -= gone

    def render(self) -> bytes:
        """The text a Prometheus server reads."""
        registry = self.registry
        if self._shared_dir is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, self._shared_dir)  # type: ignore[no-untyped-call]
        cluster = CollectorRegistry()
        if self._cluster is not None:
            cluster.register(self._cluster)
        return generate_latest(registry) + generate_latest(cluster)
