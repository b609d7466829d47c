"""One gateway's dispatching, and the reports of many instances, each as a process for `midstream bench dispatch`.

`python -m bench.dispatch_worker report|dispatch` reads its job as a line of JSON from standard input. A dispatcher says when it is ready,
and begins at the next line, or at the end of its input.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from backend.registry.redis import RedisStore
from bench.lean_backend import MODEL, report_of
from gateway.decisions import DecisionLog
from gateway.dispatcher import Dispatcher
from gateway.errors import GatewayError
from gateway.garbage import look_seldom
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from gateway.suspects import Suspects
from migration.leg import RequestId

REPORT_TTL_S = 10.0


@dataclass(frozen=True, slots=True)
class ReportJob:
    """So many instances, each reporting every `interval_s`."""

    redis: str
    instances: int
    interval_s: float


@dataclass(frozen=True, slots=True)
class DispatchJob:
    """Requests at `rate` per second, at random moments, for `seconds`; each holds its place for `held_s`."""

    redis: str
    gateway: str
    rate: float
    seconds: float
    held_s: float
    prompt_tokens: int
    seed: int


@dataclass(slots=True)
class Dispatched:
    """What came of a DispatchJob. Latency is from arrival to claim, in seconds."""

    latency_s: list[float] = field(default_factory=list)
    by_instance: dict[str, int] = field(default_factory=dict)
    conflicts: float = 0.0
    late_s: list[float] = field(default_factory=list)
    """How far the process itself was behind its arrivals: above a few ms it is the bench that is overloaded."""
    errors: int = 0


async def report(job: ReportJob) -> None:
    """Every instance at full rate, evenly spread over the interval."""
    store = RedisStore(job.redis, max_connections=32)

    async def one(number: int) -> None:
        name = f"bench-{number:03}"
        sequence = 0
        due_s = time.perf_counter() + job.interval_s * number / job.instances
        while True:
            sequence += 1
            told = report_of(name, f"http://127.0.0.1:{10000 + number}", sequence)
            await store.publish(told, REPORT_TTL_S)
            due_s = max(due_s + job.interval_s, time.perf_counter() - job.interval_s)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for number in range(job.instances):
            group.create_task(one(number))


async def dispatch(job: DispatchJob) -> Dispatched:
    """An open loop: arrivals do not wait for one another."""
    settings = GatewaySettings(gateway_id=job.gateway, redis_url=job.redis)
    policy, suspects = settings.build_policy(), Suspects(time.monotonic, settings.suspect_s)
    store = RedisStore(job.redis)
    metrics = Metrics(CollectorRegistry())
    ledger = Ledger(store, settings, time.monotonic, metrics)
    decisions = DecisionLog(settings.decisions_kept, logged=frozenset(), metrics=metrics)
    line = Line(ledger, policy, suspects, settings, time.monotonic, metrics, decisions)
    chance = random.Random(job.seed)
    dispatcher = Dispatcher(ledger, line, policy, suspects, settings, time.monotonic, metrics, chance, decisions)
    rng, told, spread = random.Random(job.seed), Dispatched(), Counter[str]()

    async def one(number: int, due_s: float) -> None:
        try:
            async with ledger.place(RequestId(f"{job.gateway}-{number}"), "normal", job.prompt_tokens) as place:
                view = await dispatcher.choose(place, MODEL, frozenset())
                told.latency_s.append(time.perf_counter() - due_s)
                spread[view.id] += 1
                await asyncio.sleep(job.held_s)
        except GatewayError:
            told.errors += 1

    await ledger.view(0.0)
    look_seldom()
    async with asyncio.TaskGroup() as beside:
        loops = [beside.create_task(loop) for loop in (line.keep(), line.hear(), line.renew(), ledger.keep(), ledger.look_beside())]
        await _all_ready()
        await _arrive(job, rng, told, one)
        for loop in loops:
            loop.cancel()
    told.by_instance = dict(spread)
    samples = (sample for family in metrics.conflicts.collect() for sample in family.samples)
    told.conflicts = next(sample.value for sample in samples if sample.name.endswith("_total"))
    await store.close()
    return told


async def _all_ready() -> None:
    """Say so, and wait for the others: one that still starts takes its time from those that have begun."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def _arrive(job: DispatchJob, rng: random.Random, told: Dispatched, one: Callable[[int, float], Coroutine[Any, Any, None]]) -> None:
    """All requests, to their ends."""
    async with asyncio.TaskGroup() as group:
        due_s = time.perf_counter()
        end_s, number = due_s + job.seconds, 0
        while due_s < end_s:
            due_s += rng.expovariate(job.rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            told.late_s.append(time.perf_counter() - due_s)
            group.create_task(one(number, due_s))
            number += 1


def main() -> int:
    """One job."""
    job = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1] == "report":
            runner.run(report(ReportJob(**job)))
        else:
            print(json.dumps(asdict(runner.run(dispatch(DispatchJob(**job))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
