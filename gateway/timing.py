"""How long requests take, by tier and model: to their first token, from token to token, and in all."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.labelled import Labelled

OTHER = "other"
"""The label of models that no instance serves."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_LABELS = ("tier", "model")

TOLD_GAPS = 16
"""Gaps between tokens are told to the histogram so many at a time: one after the other costs less than each by itself."""


class Timings:
    """The histograms. The labels are bounded: tiers are settings, and a model's name is taken from the instance that serves it."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self.labelled = Labelled()
        self.answers = Counter(
            f"{prefix}_answers", "Requests that are over, by tier, model and outcome.", [*_LABELS, "outcome"], registry=registry
        )
        self.ttft_s = Histogram(f"{prefix}_ttft_seconds", "Arrival to first token.", _LABELS, buckets=_SECONDS, registry=registry)
        self.itl_s = Histogram(
            f"{prefix}_itl_seconds",
            "From one token, or few that come together, to the next.",
            _LABELS,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.tpot_s = Histogram(
            f"{prefix}_tpot_seconds", "First token to last, by token after the first.", _LABELS, buckets=_TOKEN_SECONDS, registry=registry
        )
        self.objectives = Counter(
            f"{prefix}_objectives",
            "Answers that met their tier's objective (ttft: to the first token; tpot: per token after it), or missed it.",
            ["tier", "objective", "outcome"],
            registry=registry,
        )
        self.e2e_s = Histogram(
            f"{prefix}_e2e_seconds", "Arrival to end, of requests that went well.", _LABELS, buckets=_SECONDS, registry=registry
        )

    def note_objective(self, tier: str, objective: str, took_s: float, objective_s: float) -> None:
        """Count an answer for or against its objective."""
        self.labelled(self.objectives, tier, objective, "met" if took_s <= objective_s else "missed").inc()


class RequestTimes:
    """One request's. Its relay says which instance's model serves it, and when tokens come; a token told twice counts once."""

    def __init__(self, timings: Timings, tier: str, arrived_s: float) -> None:
        self._timings = timings
        self._tier = tier
        self._arrived_s = arrived_s
        self._model = OTHER
        self._gaps_s: list[float] = []
        self._tokens = 0
        self._first_s: float | None = None
        self._last_s = arrived_s

    def serve(self, wanted: str | None, models: tuple[str, ...]) -> None:
        """An instance that serves these models has it; without a wish it is the first of them."""
        name = wanted if wanted in models else models[0] if wanted is None and models else OTHER
        if name != self._model:
            self._tell_gaps()
            self._model = name or OTHER

    def note_tokens(self, tokens: int, now_s: float, events: int = 1) -> None:
        """There are so many output tokens now; the latest came in so many events, together."""
        if tokens <= self._tokens:
            return
        if self._first_s is None:
            self._first_s = now_s
            self._timings.labelled(self._timings.ttft_s, self._tier, self._model).observe(now_s - self._arrived_s)
        else:
            self._gaps_s.append(now_s - self._last_s)
            self._gaps_s += [0.0] * (events - 1)
            if len(self._gaps_s) >= TOLD_GAPS:
                self._tell_gaps()
        self._tokens, self._last_s = tokens, now_s

    def _tell_gaps(self) -> None:
        if self._gaps_s:
            itl = self._timings.labelled(self._timings.itl_s, self._tier, self._model)
            for gap_s in self._gaps_s:
                itl.observe(gap_s)
            self._gaps_s.clear()

    def end(self, outcome: str, now_s: float) -> None:
        """It is over."""
        self._tell_gaps()
        labels = (self._tier, self._model)
        self._timings.labelled(self._timings.answers, *labels, outcome).inc()
        if outcome != "ok":
            return
        self._timings.labelled(self._timings.e2e_s, *labels).observe(now_s - self._arrived_s)
        if self._first_s is not None and self._tokens > 1:
            self._timings.labelled(self._timings.tpot_s, *labels).observe((self._last_s - self._first_s) / (self._tokens - 1))
