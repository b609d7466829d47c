"""What one request took: for the metrics, for its caller's rates, and for the request log."""

from collections.abc import Callable

from gateway.asked import Asked
from gateway.metrics import Metrics
from gateway.request_log import RequestEntry
from gateway.timing import RequestTimes
from migration.leg import InstanceId, RequestId


class Account:
    """Owned by one relay, which tells it what happens; times are the clock's, in seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self.arrived_s = clock()
        self._asked: Asked | None = None
        self._times: RequestTimes | None = None
        self._request = RequestId("")
        self._first_byte_s: float | None = None
        self._first_token_s: float | None = None
        self._served_by = InstanceId("")
        self._tokens = 0

    @property
    def used_tokens(self) -> int:
        """What the request has cost so far: nothing until it has an answer, then its prompt (an estimate) and what has been relayed."""
        return self._asked.fields.prompt_tokens + self._tokens if self._asked and self._first_byte_s is not None and self._tokens else 0

    def open(self, request: RequestId, asked: Asked) -> None:
        """The request is understood."""
        self._request, self._asked = request, asked
        self._times = RequestTimes(self._metrics.timings, asked.tier.name, self.arrived_s)

    def serve(self, models: tuple[str, ...]) -> None:
        """An instance that serves these models has the request."""
        if self._times is not None and self._asked is not None:
            self._times.serve(self._asked.fields.model, models)

    def begin(self, tier: str, served_by: InstanceId) -> None:
        """The client is about to see its first byte."""
        self._served_by = served_by
        self._first_byte_s = self._clock() - self.arrived_s
        self._metrics.labelled(self._metrics.first_byte_s, tier).observe(self._first_byte_s)

    def relay(self, tokens: int, now_s: float, served_by: InstanceId, events: int = 1) -> None:
        """So many tokens have come in all, the latest in so many events that came together."""
        self._tokens, self._served_by = tokens, served_by
        if self._times is not None:
            self._times.note_tokens(tokens, now_s, events)
        if not tokens or self._first_token_s is not None or self._asked is None:
            return
        self._first_token_s = now_s
        tier = self._asked.tier
        self._metrics.timings.note_objective(tier.name, "ttft", now_s - self.arrived_s, tier.ttft_objective_s)

    def complete(self) -> int:
        """The answer is whole; how many tokens it has."""
        if self._asked is not None and self._first_token_s is not None and self._tokens > 1:
            tpot_s = (self._clock() - self._first_token_s) / (self._tokens - 1)
            self._metrics.timings.note_objective(self._asked.tier.name, "tpot", tpot_s, self._asked.tier.tpot_objective_s)
        return self._tokens

    def end(self, outcome: str) -> RequestEntry | None:
        """The request is over; what the request log gets, None if it was never understood."""
        if self._asked is None or self._times is None:
            return None
        self._times.end(outcome, self._clock())
        fields, tier, ttft_s = self._asked.fields, self._asked.tier.name, self._first_byte_s
        served_by = self._served_by if ttft_s is not None else ""
        e2e_s = self._clock() - self.arrived_s
        return RequestEntry(
            self._request, self.arrived_s, tier, fields.model, fields.prompt_tokens, self._tokens, ttft_s, e2e_s, outcome, served_by
        )
