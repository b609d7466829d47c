"""Every metric of the gateway, once. The registry is passed in: two gateways in one process do not share one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from migration.plan import MigrationOutcome, MigrationResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_DISPATCH_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts what one gateway does. No label's values grow with requests or with instances."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        prefix = "midstream_gateway"
        self.requests = Counter(
            f"{prefix}_requests", "Requests that are over, by tier and outcome ('ok' or a reason).", ["tier", "outcome"], registry=registry
        )
        self.live = Gauge(f"{prefix}_live_requests", "Requests being served.", registry=registry)
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
        self.moves = Counter(
            f"{prefix}_migrations",
            "Moves ordered here, by how they ended and why they were ordered.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.move_bytes = Counter(f"{prefix}_migration_bytes", "KV bytes of moves ordered here.", ["reason"], registry=registry)
        self.move_stages = Histogram(
            f"{prefix}_migration_stages", "Copy stages of a move that was made.", buckets=(0, 1, 2, 3, 4, 6, 8), registry=registry
        )
        self.move_s = Histogram(
            f"{prefix}_migration_seconds", "Order to end, of a move that was made.", buckets=_SECONDS, registry=registry
        )
        self.move_frozen_s = Histogram(
            f"{prefix}_migration_frozen_seconds", "Freeze to committed, of a move that was made.", buckets=_GAP_SECONDS, registry=registry
        )
        self.decisions = Counter(
            f"{prefix}_decisions", "Decisions by kind and by the instance that was chosen.", ["kind", "instance"], registry=registry
        )
        self.leading = Gauge(f"{prefix}_rebalancing", "1 while this gateway holds the lease of rebalancing.", registry=registry)
        self.resumes = Counter(
            f"{prefix}_resumes",
            "Requests whose instance was gone in mid-answer: 'resumed' elsewhere, 'failed', or 'refused'; and why.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.remembered_tokens = Gauge(
            f"{prefix}_remembered_tokens", "Token ids held, so that streams can go on elsewhere.", registry=registry
        )
        self.queue_length = Gauge(f"{prefix}_queue_length", "Requests of this gateway that wait in line.", ["tier"], registry=registry)
        self.queue_oldest_s = Gauge(
            f"{prefix}_queue_oldest_seconds", "How long the oldest of them has waited.", ["tier"], registry=registry
        )
        self.queued_s = Histogram(
            f"{prefix}_queued_seconds", "Time in line, of requests that were in one.", ["tier"], buckets=_SECONDS, registry=registry
        )
        self.dispatch_s = Histogram(
            f"{prefix}_dispatch_seconds",
            "One look at the cluster, decision and claim included.",
            buckets=_DISPATCH_SECONDS,
            registry=registry,
        )
        self.objectives = Counter(
            f"{prefix}_objectives",
            "Answers that met their tier's objective (ttft: to the first token; tpot: per token after it), or missed it.",
            ["tier", "objective", "outcome"],
            registry=registry,
        )
        self.conflicts = Counter(f"{prefix}_claim_conflicts", "Claims lost to another gateway's, and chosen anew.", registry=registry)
        self.store_errors = Counter(f"{prefix}_store_errors", "Questions the store did not answer.", registry=registry)
        self.store_up = Gauge(f"{prefix}_store_up", "1 while the store answers.", registry=registry)
        self.store_up.set(1)

    def note_decision(self, kind: str, instance: str) -> None:
        """A decision has chosen that instance."""
        self.decisions.labels(kind, instance).inc()

    def note_move(self, outcome: MigrationOutcome, reason: str) -> None:
        """A move ordered here is over."""
        moved = outcome.result is MigrationResult.MOVED
        self.moves.labels(outcome.result.value if moved else outcome.reason or outcome.result.value, reason).inc()
        self.move_bytes.labels(reason).inc(outcome.bytes)
        if moved:
            self.move_stages.observe(outcome.stages)
            self.move_s.observe(outcome.total_ms / 1e3)
            self.move_frozen_s.observe(outcome.frozen_ms / 1e3)

    def note_objective(self, tier: str, objective: str, took_s: float, objective_s: float) -> None:
        """Count an answer for or against its objective."""
        self.objectives.labels(tier, objective, "met" if took_s <= objective_s else "missed").inc()

    def render(self) -> bytes:
        """The text a Prometheus server reads."""
        return generate_latest(self.registry)
