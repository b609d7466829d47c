"""Plays a workload to a live gateway, each request at its time, and measures what its client sees."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import aiohttp

from simulator.calibration import Measured
from simulator.workload import Arrival

_FIRST_TOKEN_ID, _TOKEN_IDS = 1000, 1000
"""Prompts are random token ids of this range, which every vocabulary has: no two begin alike."""
_LINE_BYTES = 2**20


class ReplayError(Exception):
    """The gateway could not be played to; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `key` is a bearer token, if the gateway wants one. `timeout_s` is what a whole answer may take, at a time scale
    of 1 or less; above that it grows with it."""

    url: str
    model: str
    key: str | None = None
    timeout_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Played:
    """What came back, in the order of arrival: None for a request without a whole answer, whose reason is one of the `failures`."""

    measured: tuple[Measured | None, ...]
    failures: tuple[str, ...]


async def play(target: Target, arrivals: Sequence[Arrival], time_scale: float, seed: int, clock: Callable[[], float]) -> Played:
    """Send every arrival at its time, `time_scale` times as slowly as the workload says. A late client sends at once.

    Raises ReplayError if no request got an answer at all.
    """
    rng = Random(f"{seed}-prompts")
    timeout_s = target.timeout_s * max(1.0, time_scale)
    bodies = [_body(target.model, each, rng) for each in arrivals]
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    async with aiohttp.ClientSession(
        target.url, headers=headers, connector=aiohttp.TCPConnector(limit=0), read_bufsize=_LINE_BYTES
    ) as session:
        began_s = clock()

        async def one(arrival: Arrival, body: bytes) -> Measured | str:
            await asyncio.sleep(max(0.0, began_s + arrival.arrival_s * time_scale - clock()))
            return await _ask(session, arrival, body, timeout_s, clock)

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one(arrival, body)) for arrival, body in zip(arrivals, bodies, strict=True)]
    answers = [task.result() for task in asked]
    measured = tuple(each if isinstance(each, Measured) else None for each in answers)
    failures = tuple(each for each in answers if isinstance(each, str))
    if len(failures) == len(answers):
        raise ReplayError(f"no request was answered: {failures[0] if failures else 'there is none'}")
    return Played(measured, failures)


def _body(model: str, arrival: Arrival, rng: Random) -> bytes:
    prompt = [_FIRST_TOKEN_ID + rng.randrange(_TOKEN_IDS) for _ in range(arrival.prompt_tokens)]
    fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": arrival.output_tokens,
        "min_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


async def _ask(
    session: aiohttp.ClientSession, arrival: Arrival, body: bytes, timeout_s: float, clock: Callable[[], float]
) -> Measured | str:
    """One request's measurements, or the reason there are none."""
    headers = {"content-type": "application/json", "priority": arrival.tier}
    began_s = clock()
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post("/v1/completions", data=body, headers=headers, timeout=aiohttp.ClientTimeout()) as response,
        ):
            if response.status != 200:
                return f"status {response.status}: {(await response.text())[:200]}"
            return await _read(response, began_s, clock)
    except TimeoutError:
        return f"no whole answer within {timeout_s:g} s"
    except aiohttp.ClientError as error:
        return f"{type(error).__name__}: {error}"


async def _read(response: aiohttp.ClientResponse, began_s: float, clock: Callable[[], float]) -> Measured | str:
    first_s = last_s = None
    events = tokens = 0
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now_s = clock()
        event = json.loads(line[6:])
        if event.get("error"):
            return f"error in the stream: {event['error']}"
        usage = event.get("usage")
        if usage:
            tokens = usage["completion_tokens"]
        if event.get("choices"):
            events += 1
            last_s = now_s
            first_s = first_s if first_s is not None else now_s
    if first_s is None or last_s is None:
        return "the stream had no token"
    tokens = tokens or events
    tpot_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
    return Measured(first_s - began_s, tpot_s, last_s - began_s, tokens)
