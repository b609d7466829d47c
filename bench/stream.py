"""One stream as a client sees it: the moment of every event, and a move ordered in its middle."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL_TOKENS_FROM = 1000
"""Prompts are token ids from here on: ordinary words of any vocabulary, none of them special."""


@dataclass(slots=True)
class Seen:
    """`at_s` holds one moment per event that brought a token; `ordered_s` and `over_s` frame the move."""

    instance: str = ""
    started_s: float = 0.0
    at_s: list[float] = field(default_factory=list)
    text: str = ""
    outcome: dict[str, Any] | None = None
    ordered_s: float = 0.0
    over_s: float = 0.0
    done: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_tokens(self, tokens: int) -> None:
        """Until that many have come, or the stream is over."""
        while len(self.at_s) < tokens and not self.done:
            self.grown.clear()
            await self.grown.wait()

    @property
    def ttft_ms(self) -> float:
        return (self.at_s[0] - self.started_s) * 1e3

    def gaps_ms(self, start_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Gaps between tokens that lie wholly within the window."""
        return [(b - a) * 1e3 for a, b in zip(self.at_s, self.at_s[1:], strict=False) if a >= start_s and b <= end_s]

    @property
    def downtime_ms(self) -> float:
        """The gap between the last event before the hand-over and the first after it.

        The relay, which knows where it switched, says how long the gap was there; here it is the one of that time that is nearest to
        it. (The longest gap of that time would be another one now and then: the copy, or chance.) If the relay could not say it in
        time, because the gap was longer than the order waits for it, the longest is the one.
        """
        touching = [(b - a) * 1e3 for a, b in zip(self.at_s, self.at_s[1:], strict=False) if b >= self.ordered_s and a <= self.over_s]
        there_ms = (self.outcome or {}).get("downtime_ms")
        return max(touching) if there_ms is None else min(touching, key=lambda gap_ms: abs(gap_ms - float(there_ms)))


def prompt_of(tokens: int, variant: int = 0) -> list[int]:
    """That many token ids, different for each variant, the same in every run."""
    return [MODEL_TOKENS_FROM + (position * 7919 + variant * 104729) % 20000 for position in range(tokens)]


async def run_stream(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    salt: str,
    move_after: int | None = None,
    mode: str = "live",
    priority: str | None = None,
    seen: Seen | None = None,
) -> Seen:
    """Read one completion; with `move_after`, order a move once that many tokens have come. Greedy, exactly `max_tokens` long.
    `priority` is the header's value."""
    seen = seen or Seen()
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "cache_salt": salt}
    async with asyncio.TaskGroup() as group:
        seen.started_s = time.perf_counter()
        headers = {"priority": priority} if priority else {}
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.is_error:
                raise RuntimeError(f"{url} answered {response.status_code}: {(await response.aread()).decode()}")
            seen.instance = response.headers.get("x-midstream-instance", "")
            request = response.headers.get("x-request-id", "")
            async for line in response.aiter_lines():
                _take(seen, line)
                if move_after is not None and len(seen.at_s) == move_after and not seen.ordered_s:
                    group.create_task(_move(client, url, request, mode, seen))
    return seen


def _take(seen: Seen, line: str) -> None:
    if line == "data: [DONE]":
        seen.done = True
        seen.grown.set()
    elif line.startswith("data: "):
        choices = json.loads(line[6:])["choices"]
        if choices:
            seen.at_s.append(time.perf_counter())
            seen.text += choices[0]["text"]
            seen.grown.set()


async def _move(client: httpx.AsyncClient, url: str, request: str, mode: str, seen: Seen) -> None:
    seen.ordered_s = time.perf_counter()
    response = await client.post(f"{url}/admin/migrations", json={"request": request, "mode": mode})
    seen.over_s = time.perf_counter()
    seen.outcome = response.json()
