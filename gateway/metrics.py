"""Every metric of the gateway, once. The registry is passed in: two gateways in one process do not share one."""

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counts what one gateway does. No label's values grow with requests or with instances.

    With `shared` it is one of several workers: all keep their counts there, and each shows them together.
    """

    def __init__(self, registry: CollectorRegistry, shared: Path | None = None) -> None:
        self.registry = registry
        self._shared = shared
        prefix = "midstream_gateway"
        self.requests = Counter(
            f"{prefix}_requests", "Requests that are over, by tier and outcome ('ok' or a reason).", ["tier", "outcome"], registry=registry
        )
        self.live = Gauge(f"{prefix}_live_requests", "Requests being served.", multiprocess_mode="livesum", registry=registry)
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
        self.conflicts = Counter(f"{prefix}_claim_conflicts", "Claims lost to another gateway's, and chosen anew.", registry=registry)
        self.store_errors = Counter(f"{prefix}_store_errors", "Questions the store did not answer.", registry=registry)
        self.store_up = Gauge(f"{prefix}_store_up", "1 while the store answers.", multiprocess_mode="livemin", registry=registry)
        self.store_up.set(1)

    def render(self) -> bytes:
        """The text a Prometheus server reads: of all workers together, if there are several."""
        if self._shared is None:
            return generate_latest(self.registry)
        whole = CollectorRegistry()
        MultiProcessCollector(whole, str(self._shared))  # type: ignore[no-untyped-call]
        return generate_latest(whole)
