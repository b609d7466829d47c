"""Whether one answer meets its tier's objectives: time to the first token, and time per token after it."""

from gateway.metrics import Metrics
from gateway.policy.tier import Tier


class Attainment:
    """Counts the answer once for each objective. `arrived_s` is when its request came."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._first_s: float | None = None

    def note_token(self, tier: Tier, now_s: float) -> bool:
        """There are tokens now. True the first time."""
        if self._first_s is not None:
            return False
        self._first_s = now_s
        self._metrics.note_objective(tier.name, "ttft", now_s - self._arrived_s, tier.ttft_objective_s)
        return True

    def note_end(self, tier: Tier, tokens: int, now_s: float) -> None:
        """The answer is complete, with so many tokens."""
        if self._first_s is not None and tokens > 1:
            self._metrics.note_objective(tier.name, "tpot", (now_s - self._first_s) / (tokens - 1), tier.tpot_objective_s)
