"""What is counted of the moves that this gateway orders: how they ended and why they were ordered, and what they cost."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from migration.plan import MigrationOutcome, MigrationResult

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGES = (0, 1, 2, 3, 4, 6, 8)


class MoveMetrics:
    """The label `reason` is that of the order: `order` for a person's, else a Reason of gateway/policy/rebalance.py."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        why = ["reason"]
        self.ended = Counter(
            f"{prefix}_migrations", "Moves ordered here, by how they ended and why they were ordered.", ["outcome", *why], registry=registry
        )
        self.bytes = Counter(f"{prefix}_migration_bytes", "KV bytes of moves ordered here.", why, registry=registry)
        self.stages = Histogram(f"{prefix}_migration_stages", "Copy stages of moves made.", why, buckets=_STAGES, registry=registry)
        self.total_s = Histogram(f"{prefix}_migration_seconds", "Order to end, of moves made.", why, buckets=_SECONDS, registry=registry)
        self.frozen_s = Histogram(
            f"{prefix}_migration_frozen_seconds", "Freeze to committed, of moves made.", why, buckets=_GAP_SECONDS, registry=registry
        )
        self.downtime_s = Histogram(
            f"{prefix}_migration_downtime_seconds", "Gap that the client saw, of moves made.", why, buckets=_GAP_SECONDS, registry=registry
        )

    def note(self, outcome: MigrationOutcome, reason: str) -> None:
        """A move is over."""
        moved = outcome.result is MigrationResult.MOVED
        self.ended.labels(outcome.result.value if moved else outcome.reason or outcome.result.value, reason).inc()
        self.bytes.labels(reason).inc(outcome.bytes)
        if moved:
            self.stages.labels(reason).observe(outcome.stages)
            self.total_s.labels(reason).observe(outcome.total_ms / 1e3)
            self.frozen_s.labels(reason).observe(outcome.frozen_ms / 1e3)
