"""What is counted of requests in line, by tier."""

from prometheus_client import CollectorRegistry, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class LineMetrics:
    """Tiers are settings, so the labels are bounded. Of several processes the lengths are added up, and the oldest is the oldest of all."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self.length = Gauge(
            f"{prefix}_queue_length",
            "Requests of this gateway that wait in line.",
            ["tier"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.oldest_s = Gauge(
            f"{prefix}_queue_oldest_seconds",
            "How long the oldest of them has waited.",
            ["tier"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.queued_s = Histogram(
            f"{prefix}_queued_seconds", "Time in line, of requests that were in one.", ["tier"], buckets=_SECONDS, registry=registry
        )

    def show(self, tier: str, length: int, oldest_s: float) -> None:
        """How the line stands now."""
        self.length.labels(tier).set(length)
        self.oldest_s.labels(tier).set(oldest_s)
