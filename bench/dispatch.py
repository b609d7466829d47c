"""`midstream bench dispatch`: how long a request waits for its place while many instances report and several gateways claim.

Instances report at full rate (every 50 ms) into one Redis. Gateways, each a process with the product's own ledger and dispatcher, place
requests of 64 tokens at a rising rate; a place is held as long as 64 tokens take. No HTTP and no engine takes part.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

from backend.peers.environment import read_or_exit
from bench.dispatch_worker import Dispatched, DispatchJob, ReportJob
from bench.process_tree import tree_cost
from bench.relay import percentile
from deploy.health import free_ports, redis_probe
from deploy.process import Program, supervise
from deploy.redis_server import find_redis_server, redis_command
from deploy.settings import DeploySettings

REPORT_INTERVAL_S = 0.05
HELD_S = 64 * 0.02
PROMPT_TOKENS = 64
START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement."""

    instances: int
    gateways: int
    rate: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if every request found a place."""
    parser = argparse.ArgumentParser(prog="midstream bench dispatch", description="How long requests wait for their place.")
    parser.add_argument("--instances", default="64,256", metavar="N,N", help="instances that report (default: %(default)s)")
    parser.add_argument("--gateways", type=int, default=4, help="gateway processes (default: %(default)s)")
    parser.add_argument("--rates", default="250,500,1000,2000", metavar="R,R", help="requests per second, in all (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each rate lasts (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = parser.parse_args(argv)
    steps = [
        Step(int(instances), options.gateways, float(rate), options.seconds)
        for instances in options.instances.split(",")
        for rate in options.rates.split(",")
    ]
    rows = asyncio.run(measure(steps))
    print(json.dumps({"steps": rows}, indent=2) if options.json else "\n".join(json.dumps(row) for row in rows))
    return 1 if any(row["errors"] for row in rows) else 0


async def measure(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """All steps, each with a Redis of its own. Progress goes to standard error."""
    settings = read_or_exit(DeploySettings)
    rows = []
    with redirect_stdout(sys.stderr):
        for step in steps:
            print(f"{step.instances} instances, {step.gateways} gateways, {step.rate:g} requests/s", flush=True)
            async with supervise(settings.logs / "bench", settings.stop_timeout_s) as supervisor:
                [port] = free_ports("127.0.0.1", 1)
                settings.logs.mkdir(parents=True, exist_ok=True)
                command = redis_command(find_redis_server(), port, settings.logs)
                redis = await supervisor.start(Program("redis", command))
                await supervisor.wait_healthy(redis, redis_probe(port), START_TIMEOUT_S)
                rows.append(await _step(step, f"redis://127.0.0.1:{port}/0", redis.process.pid))
    return rows


async def _step(step: Step, redis: str, redis_pid: int) -> dict[str, Any]:
    async with _reporting(ReportJob(redis, step.instances, REPORT_INTERVAL_S)):
        await asyncio.sleep(1.0)
        before = tree_cost(redis_pid)
        jobs = [
            DispatchJob(redis, f"g{number}", step.rate / step.gateways, step.seconds, HELD_S, PROMPT_TOKENS, number)
            for number in range(step.gateways)
        ]
        begun = asyncio.Barrier(len(jobs))
        told = await asyncio.gather(*(_dispatched(job, begun) for job in jobs))
        redis_cpu_s = tree_cost(redis_pid).cpu_s - before.cpu_s
    return summary(step, told, redis_cpu_s)


def summary(step: Step, told: Sequence[Dispatched], redis_cpu_s: float) -> dict[str, Any]:
    """One row. `spread` compares the instances by how many requests each got: the most and the least, over the mean."""
    latency_s = [value for each in told for value in each.latency_s]
    late_s = [value for each in told for value in each.late_s]
    spread = sum((Counter(each.by_instance) for each in told), Counter[str]())
    counts = [*spread.values(), *([0] * (step.instances - len(spread)))]
    mean = statistics.mean(counts)
    return {
        **asdict(step),
        "dispatched": len(latency_s),
        "claims_per_s": round(len(latency_s) / step.seconds, 1),
        "dispatch_ms": {f"p{p}": round(percentile(latency_s, p) * 1e3, 3) for p in (50, 99)} if latency_s else None,
        "bench_late_ms": {f"p{p}": round(percentile(late_s, p) * 1e3, 3) for p in (50, 99)} if late_s else None,
        "conflicts": sum(each.conflicts for each in told),
        "redis_cpu_share": round(redis_cpu_s / step.seconds, 3),
        "spread": {"most": round(max(counts) / mean, 3), "least": round(min(counts) / mean, 3)} if mean else None,
        "errors": sum(each.errors for each in told),
    }


async def _dispatched(job: DispatchJob, begun: asyncio.Barrier) -> Dispatched:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.dispatch_worker", "dispatch"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(job.seconds * 3 + 60):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            await process.stdout.readline()
            await begun.wait()
            told, _ = await process.communicate(b"\n")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Dispatched(**json.loads(told))


@asynccontextmanager
async def _reporting(job: ReportJob) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.dispatch_worker", "report"), stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(asdict(job)).encode())
        process.stdin.close()
        yield
    finally:
        process.kill()
        await process.wait()
