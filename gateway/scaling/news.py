"""What is told of operations: to the event feed, the metrics and the log."""

import logging
from dataclasses import dataclass

from gateway.events import EventFeed
from gateway.scale_metrics import ScaleMetrics
from gateway.scaling.operation import Operation, OperationEvent, OperationKind

log = logging.getLogger("midstream.gateway.scaling")


@dataclass(frozen=True, slots=True)
class News:
    """Where it is told."""

    events: EventFeed
    metrics: ScaleMetrics

    def happened(self, kind: OperationKind, event: OperationEvent) -> None:
        """Something to one instance of an operation."""
        self.metrics.events.labels(kind.value, event.value).inc()

    def ended(self, operation: Operation) -> None:
        """It is over, one way or another."""
        instances = [subject.instance for subject in operation.subjects]
        fields = {"operation": operation.id, "kind": operation.kind.value, "state": operation.state, "instances": instances}
        self.metrics.operations.labels(operation.kind.value, operation.state).inc()
        self.events.publish("operation_ended", fields)
        log.info("operation %s (%s of %s): %s", operation.id, operation.kind, ", ".join(instances), operation.state)
