"""The run: workers that ask without end, some of which leave, moves, and a look at every process now and then."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import aiohttp

from bench.chaos.client import Client, requests_of
from bench.chaos.fleet import ASK_S, ChaosFleet
from bench.chaos.verdict import Got, Verdict, comparable, judge
from bench.soak.trend import trend_of
from bench.soak.usage import Usage, usage_of

WORKERS = 8
LEAVES_ONE_IN = 10
"""So many clients leave in mid-answer."""
MOVE_EVERY_S = 0.5
LOOK_EVERY_S = 1.0
TELL_EVERY_S = 60.0
GAUGES = ("midstream_gateway_live_requests", "midstream_flights", "midstream_migrations_in", "midstream_migrations_out")


@dataclass(slots=True)
class Watched:
    """One process over the time."""

    at_s: list[float] = field(default_factory=list)
    seen: list[Usage] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        memory = trend_of(self.at_s, [usage.memory_kib for usage in self.seen])
        descriptors = trend_of(self.at_s, [float(usage.descriptors) for usage in self.seen])
        return {
            "memory_kib": round(memory.last),
            "memory_kib_per_minute": round(memory.per_minute, 1),
            "memory_noise_kib": round(memory.noise),
            "memory_grows": memory.rises,
            "descriptors": self.seen[-1].descriptors,
            "descriptors_per_minute": round(descriptors.per_minute, 2),
            "descriptors_grow": descriptors.rises,
        }


class Soak:
    """One run over one fleet."""

    def __init__(self, fleet: ChaosFleet, seed: int) -> None:
        self._fleet = fleet
        self._random = Random(seed)
        self._client = Client(fleet)
        self._requests = requests_of(fleet.model, fleet.pace.output_tokens)
        self._expected: list[bytes] = []
        self._verdicts: Counter[Verdict] = Counter()
        self._left = 0
        self._running: dict[int, Got] = {}
        self._watched = {process.program.name: Watched() for process in fleet.processes}

    async def all(self, minutes: float) -> dict[str, Any]:
        """The report. Raises ExceptionGroup if a process of the fleet dies."""
        await self._learn()
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._watch(started_s)), group.create_task(self._move())]
            workers = [group.create_task(self._work(number, started_s + 60 * minutes)) for number in range(WORKERS)]
            await asyncio.wait(workers)
            for task in background:
                task.cancel()
        leaks = await self._fleet.leaks()
        await self._fleet.count()
        return {
            "minutes": minutes,
            "streams": self._verdicts.total() + self._left,
            "left": self._left,
            "moved": round(self._fleet.totals.get("moved", 0)),
            "wrong": self._verdicts[Verdict.WRONG],
            "lost": self._verdicts[Verdict.LOST],
            "truncated": self._verdicts[Verdict.TRUNCATED],
            "leaked": asdict(leaks),
            "gauges": await self._gauges(),
            "processes": {name: watched.report() for name, watched in self._watched.items()},
        }

    async def _learn(self) -> None:
        for request in self._requests:
            got = self._client.new(request)
            await self._client.read(request, 0, got)
            self._expected.append(comparable(got.body, got.request))

    async def _work(self, number: int, until_s: float) -> None:
        while time.perf_counter() < until_s:
            which, gateway = self._random.randrange(len(self._requests)), self._random.randrange(len(self._fleet.gateways))
            request = self._requests[which]
            got = self._running[number] = self._client.new(request)
            leaves_after_s = self._random.uniform(0, 1) if self._random.randrange(LEAVES_ONE_IN) == 0 else None
            try:
                async with asyncio.timeout(leaves_after_s):
                    await self._client.read(request, gateway, got)
            except TimeoutError:
                self._left += 1
                continue
            verdict = judge(got, self._expected[which])
            self._verdicts[verdict] += 1
            if verdict is not Verdict.RIGHT:
                print(
                    f"{got.request}: {verdict.value}, status {got.status}, {got.reader_failed or 'ended'}, {got.body[-300:]!r}",
                    file=sys.stderr,
                    flush=True,
                )

    async def _move(self) -> None:
        """Order moves of whatever runs; what comes of them is seen in the streams."""
        while True:
            await asyncio.sleep(MOVE_EVERY_S)
            running: Sequence[Got] = list(self._running.values())
            if not running:
                continue
            url = f"{self._random.choice(self._fleet.gateways).url}/admin/migrations"
            try:
                async with (
                    asyncio.timeout(ASK_S),
                    self._fleet.client.post(url, json={"request": self._random.choice(running).request}) as said,
                ):
                    await said.read()
            except (OSError, aiohttp.ClientError):
                continue

    async def _watch(self, started_s: float) -> None:
        told_s = started_s
        while True:
            now_s = time.perf_counter()
            for process in self._fleet.processes:
                watched = self._watched[process.program.name]
                watched.at_s.append(now_s - started_s)
                watched.seen.append(await asyncio.to_thread(usage_of, process.pid))
            if now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                print(f"{(now_s - started_s) / 60:.0f} min: {self._verdicts.total()} streams", file=sys.stderr, flush=True)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _gauges(self) -> dict[str, dict[str, float]]:
        """Of every process of ours, now that nothing runs."""
        urls = {part.process.program.name: f"{part.url}/metrics" for part in self._fleet.gateways}
        urls |= {part.process.program.name: f"{part.url}/midstream/metrics" for part in self._fleet.backends}
        found: dict[str, dict[str, float]] = {}
        for name, url in urls.items():
            lines = [line.rpartition(" ") for line in (await self._fleet.ask(url)).decode().splitlines()]
            found[name] = {gauge: float(value) for gauge, _, value in lines if gauge in GAUGES}
        return found


def is_clean(report: dict[str, Any]) -> bool:
    """Every answer right, nothing held, nothing growing."""
    grows = any(one["memory_grows"] or one["descriptors_grow"] for one in report["processes"].values())
    held = any(report["leaked"].values()) or any(value for gauges in report["gauges"].values() for value in gauges.values())
    return not (grows or held or report["wrong"] or report["lost"] or report["truncated"])


def dumped(report: dict[str, Any], *, as_json: bool) -> str:
    """For a program, or for people."""
    if as_json:
        return json.dumps(report)
    lines = [f"{name}: {value}" for name, value in report.items() if name != "processes"]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in report["processes"].items())])
