"""Children of metrics with labels, looked up once: the library's own look-up takes a lock and makes texts of the labels each time."""

from typing import Any, TypeVar

from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)


class Labelled:
    """Owned with the metrics. For labels of which there are few, and that are never removed."""

    def __init__(self) -> None:
        self._children: dict[tuple[Any, ...], Any] = {}

    def __call__(self, metric: M, *labels: str) -> M:
        """The metric with these labels."""
        key = (metric, *labels)
        child: M | None = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child
