"""PURE. How many moves may begin: a token bucket as a value."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Budget:
    """`per_s` moves begin a second in the mean, and as many at once after a quiet second (one at least). 0: no bound."""

    per_s: float
    left: float = 1.0
    at_s: float = float("-inf")

    def spend(self, now_s: float) -> "Budget | None":
        """The budget after one more move; None if there is nothing left for it."""
        if not self.per_s:
            return self
        most = max(1.0, self.per_s)
        left = most if self.at_s == float("-inf") else min(most, self.left + self.per_s * (now_s - self.at_s))
        return replace(self, left=left - 1, at_s=now_s) if left >= 1 else None
