"""Every metric of a llumlet, once; on a registry of its own, since the engine has its own /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from migration.plan import MigrationOutcome

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


MAX_REASONS = 64


class LlumletMetrics:
    """Counts what this instance's llumlet does."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reasons: set[str] = set()
        self.migrations = Counter(
            "midstream_migrations", "Migrations away from here, by how they ended.", ["result", "reason"], registry=self.registry
        )
        self.bytes = Counter("midstream_migration_bytes", "KV bytes sent to other instances.", registry=self.registry)
        self.stages = Histogram(
            "midstream_migration_stages", "Copy stages of a migration that moved.", buckets=(0, 1, 2, 3, 4, 6, 8), registry=self.registry
        )
        self.frozen = Histogram(
            "midstream_migration_frozen_seconds",
            "From freeze to committed, of a migration that moved.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.total = Histogram(
            "midstream_migration_seconds",
            "Order to end, of a migration that moved.",
            buckets=(*_SECONDS, 30.0, 60.0),
            registry=self.registry,
        )
        self.flights = Gauge("midstream_flights", "Requests of gateways being served here.", registry=self.registry)
        self.migrations_in = Gauge("midstream_migrations_in", "Requests arriving here and not yet owned.", registry=self.registry)
        self.migrations_out = Gauge("midstream_migrations_out", "Requests leaving here right now.", registry=self.registry)
        self.store_failures = Counter("midstream_store_failures", "Reports that the shared store did not take.", registry=self.registry)

    def count(self, outcome: MigrationOutcome) -> None:
        """One migration has ended."""
        self.migrations.labels(outcome.result.value, self._bounded(outcome.reason)).inc()
        self.bytes.inc(outcome.bytes)
        if outcome.result == "moved":
            self.stages.observe(outcome.stages)
            self.frozen.observe(outcome.frozen_ms / 1000)
            self.total.observe(outcome.total_ms / 1000)

    def _bounded(self, reason: str) -> str:
        """Reasons can come from other backends, of other versions: a label has no more values than this."""
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
