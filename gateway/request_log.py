"""A file with one JSON line for each request that is over. `midstream trace` makes a workload of it."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from migration.typed_json import decode, encode

log = logging.getLogger("midstream.gateway")


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One request. `arrived_s` is in seconds since 1970 by this host's clock, the others are lengths of time.

    `prompt_tokens` is the gateway's estimate. `output_tokens` are those that the client was shown. `ttft_s` is None if it saw no byte,
    `instance` empty if none served it. `outcome` is 'ok', or the reason it failed, as in the metrics.
    """

    request: str
    arrived_s: float
    tier: str
    model: str | None
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    e2e_s: float
    outcome: str
    instance: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(encode(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "RequestEntry":
        """Raises ValueError."""
        return decode(RequestEntry, json.loads(text))


class RequestLog:
    """Appends to a file, or does nothing if there is none. A line is written whole, in one write; a full disk costs lines, no requests."""

    def __init__(self, file: TextIO | None, clock: Callable[[], float], now_s: float) -> None:
        self._file = file
        self._epoch_s = now_s - clock()
        self._failed = False

    def write(self, entry: RequestEntry) -> None:
        """Note it. `arrived_s` comes by the monotonic clock, and is written in seconds since 1970."""
        if self._file is None:
            return
        dated = replace(entry, arrived_s=entry.arrived_s + self._epoch_s)
        try:
            self._file.write(dated.to_json() + "\n")
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("the request log cannot be written: %s", error)
            self._failed = True


@asynccontextmanager
async def open_request_log(path: Path | None, clock: Callable[[], float]) -> AsyncIterator[RequestLog]:
    """The log in that file, which is made if need be; without a path, a log of nothing. Raises OSError if it cannot be opened."""
    now_s = datetime.now(UTC).timestamp()
    if path is None:
        yield RequestLog(None, clock, now_s)
        return
    with _appending(path) as file:
        yield RequestLog(file, clock, now_s)


def _appending(path: Path) -> TextIO:
    return path.open("a", buffering=1, encoding="utf-8")
