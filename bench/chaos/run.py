"""The run: iteration by iteration, streams and a fault among them; at the end, what is left."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from bench.chaos.client import Client, Request, requests_of
from bench.chaos.faults import inflict
from bench.chaos.fleet import ASK_S, ChaosFleet
from bench.chaos.plan import MIGRATE, Fault, Iteration, Ordered, Sizes, iterations
from bench.chaos.verdict import Got, Verdict, comparable, judge

ENDS_SHOWN = 300
"""Bytes of an answer that was not right, shown to whoever looks on."""


class Run:
    """One run over one fleet."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._client = Client(fleet)
        self._requests: Sequence[Request] = requests_of(fleet.model, fleet.pace.output_tokens)
        self._expected: list[bytes] = []
        self._verdicts: Counter[Verdict] = Counter()
        self._running_at_faults = 0
        self._faults: Counter[str] = Counter({fault.value: 0 for fault in Fault} | {MIGRATE: 0})

    async def all(self, seed: int, count: int) -> dict[str, Any]:
        """The report. Raises ExceptionGroup if a process of the fleet dies by itself, TimeoutError if the fleet cannot be mended."""
        await self._learn()
        fleet = self._fleet
        sizes = Sizes(len(fleet.backends), len(fleet.gateways), len(self._requests))
        for iteration in iterations(seed, count, sizes):
            await self._iterate(iteration)
        leaks = await fleet.leaks()
        print(f"answers under way when a fault came: {self._running_at_faults / count:.1f} on average", file=sys.stderr)
        return {
            "iterations": count,
            "streams": self._verdicts.total(),
            "moved": round(fleet.totals.get("moved", 0)),
            "resumed": round(fleet.totals.get("resumed", 0)),
            "retried": round(fleet.totals.get("retried", 0)) + self._client.retried,
            "reconnected": self._client.reconnected,
            "wrong": self._verdicts[Verdict.WRONG],
            "lost": self._verdicts[Verdict.LOST],
            "truncated": self._verdicts[Verdict.TRUNCATED],
            "leaked": asdict(leaks),
            "max_stall_ms": round(self._client.longest_silence_s * 1e3, 1),
            "faults": dict(sorted(self._faults.items())),
        }

    async def _learn(self) -> None:
        """What every request is answered when nobody disturbs it."""
        for request in self._requests:
            got = self._client.new(request)
            await self._client.read(request, 0, got)
            if not got.ended or got.status != 200:
                raise RuntimeError(f"an undisturbed request was answered {got.status}: {got.body[:ENDS_SHOWN]!r} {got.reader_failed}")
            self._expected.append(comparable(got.body, got.request))
        self._client.retried, self._client.reconnected, self._client.longest_silence_s = 0, 0, 0.0

    async def _iterate(self, iteration: Iteration) -> None:
        answers = [self._client.new(self._requests[asked.request]) for asked in iteration.asked]
        async with asyncio.TaskGroup() as group:
            for asked, got in zip(iteration.asked, answers, strict=True):
                group.create_task(self._read(asked.request, asked.gateway, asked.at_s, got))
            for ordered in iteration.ordered:
                group.create_task(self._order(ordered, answers[ordered.stream]))
            group.create_task(self._disturb(iteration))
        await self._fleet.mend()
        await self._fleet.count()
        for asked, got in zip(iteration.asked, answers, strict=True):
            verdict = judge(got, self._expected[asked.request])
            self._verdicts[verdict] += 1
            if verdict is not Verdict.RIGHT:
                self._tell(iteration, asked.gateway, got, verdict)
        self._faults[iteration.fault.value] += 1

    async def _read(self, request: int, gateway: int, at_s: float, got: Got) -> None:
        await asyncio.sleep(at_s)
        await self._client.read(self._requests[request], gateway, got)

    async def _order(self, ordered: Ordered, got: Got) -> None:
        """Whatever comes of it is seen in the stream."""
        await asyncio.sleep(ordered.at_s)
        self._faults[MIGRATE] += 1
        url = f"{self._fleet.gateways[ordered.gateway].url}/admin/migrations"
        order = {"request": got.request, "mode": ordered.mode}
        try:
            async with asyncio.timeout(ASK_S), self._fleet.client.post(url, json=order) as response:
                await response.read()
        except (OSError, aiohttp.ClientError):
            return

    async def _disturb(self, iteration: Iteration) -> None:
        await asyncio.sleep(iteration.at_s)
        self._running_at_faults += self._client.running
        await inflict(self._fleet, iteration)

    def _tell(self, iteration: Iteration, gateway: int, got: Got, verdict: Verdict) -> None:
        where = f"iteration {iteration.number} ({iteration.fault.value} {iteration.target}), {got.request} at gateway {gateway}"
        end = got.body[-ENDS_SHOWN:].decode(errors="replace")
        print(f"{where}: {verdict.value}, status {got.status}, {got.reader_failed or 'ended'}: ...{end!r}", file=sys.stderr, flush=True)
