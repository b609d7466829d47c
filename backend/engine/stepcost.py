"""PURE. What an engine's steps cost, learnt from the steps themselves.

A decode step takes base + per_token * context tokens + per_request * batch; what a step with prompt tokens takes beyond its decodes' share
is prefill base + per token * n + per token^2 * (end^2 - start^2). Each is fitted by least squares over its steps, older ones counting
less and less, with no coefficient below zero; where the steps say nothing about a coefficient (a batch that never changes), it
stays what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from backend.registry.instance import StepCost

FORGETTING = 0.998
"""What a step counts for after the next one: half of the weight is on the last 350."""
INERTIA = 1e-3
"""The weight of what was known, in steps: little, so that it decides only where the steps do not."""
MIN_STEPS = 8
SOLVE_EVERY = 4
"""Steps from one solution to the next."""
OUTLIER = 2.5
"""A step that takes so many times what was expected is cut to that: it was the machine's, not the batch's."""

_DECODE_SCALE = (1.0, 1e-4, 1e-2)
_PREFILL_SCALE = (1.0, 1e-3, 1e-6)
"""Bring features to the order of one, for the sake of the arithmetic."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computed: `decodes` requests over `context_tokens`, and prompt tokens (`prefill_tokens2`: end^2 - start^2, summed)."""

    decodes: int
    context_tokens: int
    prefill_tokens: int = 0
    prefill_tokens2: int = 0


class StepCostFit:
    """Learns; `cost` says what is known by now. O(1) a step and in memory."""

    def __init__(self) -> None:
        self._decode = _Fit(_DECODE_SCALE)
        self._prefill = _Fit(_PREFILL_SCALE)
        self._last_step_s = 0.0

    def note(self, work: StepWork, took_s: float) -> None:
        """A step is over."""
        if took_s <= 0 or not (work.decodes or work.prefill_tokens):
            return
        if not work.prefill_tokens:
            self._last_step_s = took_s
            self._decode.note((1.0, work.context_tokens, work.decodes), took_s)
            return
        _, per_token_s, per_request_s = self._decode.coefficients()
        rest_s = took_s - per_token_s * work.context_tokens - per_request_s * work.decodes
        self._prefill.note((1.0, work.prefill_tokens, work.prefill_tokens2), max(0.0, rest_s))

    def cost(self) -> StepCost:
        """Zeros for what has not been measured yet."""
        base_s, per_token_s, per_request_s = self._decode.coefficients()
        prefill_base_s, per_prompt_token_s, per_prompt_token2_s = self._prefill.coefficients()
        return StepCost(
            base_s=base_s,
            per_token_s=per_token_s,
            per_request_s=per_request_s,
            last_step_s=self._last_step_s,
            prefill_tokens_per_s=1 / per_prompt_token_s if per_prompt_token_s else self._prefill.rate(),
            prefill_base_s=prefill_base_s,
            prefill_per_token2_s=per_prompt_token2_s,
        )


class _Fit:
    """Three coefficients, none negative, of one linear cost."""

    def __init__(self, scale: Sequence[float]) -> None:
        self._scale = scale
        self._known = [0.0] * 3
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._steps = 0

    def note(self, features: Sequence[float], took_s: float) -> None:
        x = [feature * scale for feature, scale in zip(features, self._scale, strict=True)]
        expected_s = sum(coefficient * value for coefficient, value in zip(self._known, x, strict=True))
        if expected_s > 0:
            took_s = min(took_s, OUTLIER * expected_s)
        for i in range(3):
            self._products[i] = FORGETTING * self._products[i] + x[i] * took_s
            for j in range(3):
                self._squares[i][j] = FORGETTING * self._squares[i][j] + x[i] * x[j]
        self._steps += 1
        if self._steps >= MIN_STEPS and self._steps % SOLVE_EVERY == 0:
            self._known = self._solve()

    def coefficients(self) -> tuple[float, float, float]:
        """In seconds by unit of each feature."""
        first, second, third = (value * scale for value, scale in zip(self._known, self._scale, strict=True))
        return first, second, third

    def rate(self) -> float:
        """Units of the second feature a second, over all steps: for as long as the coefficients are not known. 0 if nothing is."""
        # x0 is 1, so the products' first entry is the time and the first row of the squares holds the sums of the features.
        return self._squares[0][1] / self._scale[1] / self._products[0] if self._products[0] > 0 else 0.0

    def _solve(self) -> list[float]:
        """The best coefficients that are not negative, in scaled units: the best of those with some of them held at zero."""
        weight = [max(INERTIA * self._squares[i][i], 1e-12) for i in range(3)]
        squares = [[self._squares[i][j] + (weight[i] if i == j else 0.0) for j in range(3)] for i in range(3)]
        products = [self._products[i] + weight[i] * self._known[i] for i in range(3)]
        best, best_loss = list(self._known), float("inf")
        for size in range(4):
            for free in combinations(range(3), size):
                found = _solve_linear(squares, products, free)
                if found is None or min(found) < 0:
                    continue
                loss = sum(found[i] * (sum(squares[i][j] * found[j] for j in free) - 2 * products[i]) for i in free)
                if loss < best_loss:
                    best, best_loss = found, loss
        return best


def _solve_linear(squares: Sequence[Sequence[float]], products: Sequence[float], free: Sequence[int]) -> list[float] | None:
    """The coefficients in `free` that solve their equations, the others zero; by elimination. None if they do not decide them."""
    rows = [[squares[i][j] for j in free] + [products[i]] for i in free]
    for pivot in range(len(rows)):
        largest = max(range(pivot, len(rows)), key=lambda i: abs(rows[i][pivot]))
        rows[pivot], rows[largest] = rows[largest], rows[pivot]
        if abs(rows[pivot][pivot]) < 1e-15:
            return None
        for i in range(len(rows)):
            if i != pivot:
                factor = rows[i][pivot] / rows[pivot][pivot]
                rows[i] = [value - factor * other for value, other in zip(rows[i], rows[pivot], strict=True)]
    solved = [0.0] * 3
    for row, i in enumerate(free):
        solved[i] = rows[row][-1] / rows[row][row]
    return solved
