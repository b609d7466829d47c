"""PURE. A gateway's log of ended requests (gateway/request_log.py) as a trace: what was asked of it, to be simulated or played again."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.request_log import RequestEntry
from simulator.workload import Arrival, TraceError


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """`skipped` requests got no token, so nobody knows how long their answers would have been."""

    arrivals: tuple[Arrival, ...]
    skipped: int


def trace_of(lines: Iterable[str]) -> RequestTrace:
    """Arrivals in order, from the first one on. Raises TraceError that names the line."""
    entries = [_entry(text, line) for line, text in enumerate(lines, start=1) if text.strip()]
    answered = sorted((each for each in entries if each.output_tokens > 0), key=lambda each: each.arrived_s)
    first_s = answered[0].arrived_s if answered else 0.0
    arrivals = tuple(
        Arrival(round(each.arrived_s - first_s, 6), max(1, each.prompt_tokens), each.output_tokens, each.tier) for each in answered
    )
    return RequestTrace(arrivals, len(entries) - len(answered))


def _entry(text: str, line: int) -> RequestEntry:
    try:
        return RequestEntry.from_json(text)
    except ValueError as error:
        raise TraceError(f"line {line} of the log: {error}") from error
