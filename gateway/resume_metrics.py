"""What is counted of requests that go on elsewhere after their instance was gone."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ResumeMetrics:
    """`outcomes` by outcome and reason; how much is remembered for the sake of it."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self.outcomes = Counter(
            f"{prefix}_resumes",
            "Requests whose instance was gone in mid-answer: or that were preempted there: 'resumed', 'failed', 'refused'; and why.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.remembered_tokens = Gauge(
            f"{prefix}_remembered_tokens",
            "Token ids held, so that streams can go on elsewhere.",
            registry=registry,
            multiprocess_mode="livesum",
        )
