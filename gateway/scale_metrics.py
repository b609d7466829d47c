"""What is counted of instances that are started and stopped by operations."""

from prometheus_client import CollectorRegistry, Counter


class ScaleMetrics:
    """Counted by the gateway that works on the operations."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self.operations = Counter(
            f"{prefix}_operations", "Scaling operations that are over, by kind and by how they ended.", ["kind", "state"], registry=registry
        )
        self.events = Counter(
            f"{prefix}_operation_events",
            "What happened to single instances of operations: started, failed, drained and so on.",
            ["kind", "event"],
            registry=registry,
        )
