"""`midstream bench relay`: what the relay costs, beside going direct and beside other proxies, in interleaved rounds on one machine.

Two fast fake backends stand behind each proxy in turn. Streams: so many at once, each of so many events at a rate; plain requests: one
and 32 at a time, with bodies of 1 KB and 1 MB. CPU is that of the proxy's whole process tree.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.peers.environment import read_or_exit
from bench.lean_backend import MODEL
from bench.lean_client import Job, Load, run_job
from bench.process_tree import tree_cost
from bench.proxies import HOST, OURS, PeerMissing, Proxy, find_proxy
from deploy.health import free_ports, http_probe
from deploy.process import Program, Supervisor, supervise
from deploy.redis_server import own_redis
from deploy.settings import DeploySettings

DIRECT = "direct"
START_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 30.0
BODIES = {"1KB": 1_000, "1MB": 1_000_000}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    streams: tuple[int, ...]
    events: int
    rate: float
    requests: int
    rounds: int


@dataclass(slots=True)
class Tally:
    """One proxy in one scenario, over all rounds."""

    load: Load = field(default_factory=Load)
    cpu_s: float = 0.0
    grown_bytes: list[int] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)

    def add(self, load: Load, cpu_s: float, grown_bytes: int) -> None:
        """One round more."""
        whole = self.load
        whole.ttft_s += load.ttft_s
        whole.gaps_s += load.gaps_s
        whole.latency_s += load.latency_s
        whole.errors += load.errors
        whole.events += load.events
        whole.requests += load.requests
        self.cpu_s += cpu_s
        self.grown_bytes.append(grown_bytes)
        self.per_second.append(load.requests / load.wall_s if load.wall_s else 0.0)


Table = dict[str, dict[str, Tally]]
"""By scenario and proxy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if no proxy of ours had an error."""
    parser = argparse.ArgumentParser(prog="midstream bench relay", description="What the relay costs, beside direct and other proxies.")
    parser.add_argument("--peers", default="", metavar="A,B", help="also measure these: smg, vllm-router, nginx")
    parser.add_argument(
        "--peers-venv", type=Path, default=Path(".midstream/peers"), metavar="DIR", help="where peers are installed (%(default)s)"
    )
    parser.add_argument("--ours", default=",".join(OURS), metavar="A,B", help="rows of ours (default: %(default)s)")
    parser.add_argument("--streams", default="100,1000", metavar="N,N", help="streams at once (default: %(default)s)")
    parser.add_argument("--events", type=int, default=100, help="events of a stream (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=50.0, help="events per second and stream (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=400, help="plain requests of a scenario (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = parser.parse_args(argv)
    plan = Plan(
        tuple(int(each) for each in options.streams.split(",") if each), options.events, options.rate, options.requests, options.rounds
    )
    try:
        wanted = [name for name in (*options.ours.split(","), *options.peers.split(",")) if name]
        proxies = [find_proxy(name, options.peers_venv) for name in wanted]
    except PeerMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = asyncio.run(measure(plan, proxies))
    shown = summary(table, plan)
    print(json.dumps(shown, indent=2) if options.json else as_text(shown))
    return 1 if any(row["errors"] for rows in shown["scenarios"].values() for name, row in rows.items() if name in OURS) else 0


async def measure(plan: Plan, proxies: Sequence[Proxy]) -> Table:
    """All rounds. Progress goes to standard error."""
    settings = read_or_exit(DeploySettings)
    logs = settings.logs / "bench"
    table: Table = {}
    with redirect_stdout(sys.stderr):
        async with supervise(logs, settings.stop_timeout_s) as supervisor, own_redis(supervisor) as redis:
            backends = free_ports(HOST, 4)
            plain, told = backends[:2], backends[2:]
            for port in backends:
                flags = ("--port", str(port), "--rate", str(plan.rate), *(("--redis", redis) if port in told else ()))
                program = Program(f"backend-{port}", (sys.executable, "-m", "bench.lean_backend", *flags), rank=1)
                await supervisor.wait_healthy(await supervisor.start(program), http_probe(f"http://{HOST}:{port}/health"), START_TIMEOUT_S)
            for number in range(plan.rounds):
                print(f"round {number + 1} of {plan.rounds}: {DIRECT}", flush=True)
                await _scenarios(plan, table, DIRECT, plain[0], None)
                for proxy in proxies:
                    print(f"round {number + 1} of {plan.rounds}: {proxy.name}", flush=True)
                    home = settings.home.resolve() / "bench" / proxy.name
                    async with _running(proxy, told if proxy.has_cursors else plain, redis, home, logs / proxy.name, settings) as (
                        port,
                        pid,
                    ):
                        await _scenarios(plan, table, proxy.name, port, pid)
    return table


@asynccontextmanager
async def _running(
    proxy: Proxy, backends: Sequence[int], redis: str, home: Path, logs: Path, settings: DeploySettings
) -> AsyncIterator[tuple[int, int]]:
    """One proxy, alone, for as long as this lasts: its port and its process."""
    port, second = free_ports(HOST, 2)
    async with supervise(logs, settings.stop_timeout_s) as supervisor:
        pid = await _start(supervisor, proxy, proxy.command(port, second, backends, redis, home), port)
        yield port, pid


async def _start(supervisor: Supervisor, proxy: Proxy, command: tuple[str, ...], port: int) -> int:
    """Returns when a request has come through."""
    child = await supervisor.start(Program(proxy.name, command, rank=1, environment={"MIDSTREAM_LOG_LEVEL": "warning"}))
    await supervisor.wait_healthy(child, http_probe(f"http://{HOST}:{port}{proxy.health}"), START_TIMEOUT_S)
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await run_job(Job(port, _body(200, stream=False, events=1), 4, concurrency=2, deadline_s=10.0))).errors:
            pass  # each try takes a moment: it starts a process
    return child.process.pid


async def _scenarios(plan: Plan, table: Table, name: str, port: int, pid: int | None) -> None:
    for streams in plan.streams:
        body = _body(1000, stream=True, events=plan.events)
        async with _observed(table, f"streams {streams}", name, pid) as seen:
            seen.load = await run_job(Job(port, body, streams, events=plan.events))
    for label, size in BODIES.items():
        for concurrency in (1, 32):
            count = plan.requests if size < 100_000 else max(concurrency, plan.requests // 4)
            async with _observed(table, f"requests {label} x{concurrency}", name, pid) as seen:
                seen.load = await run_job(Job(port, _body(size, stream=False, events=1), count, concurrency=concurrency))


@dataclass(slots=True)
class _Seen:
    load: Load = field(default_factory=Load)
    peak_bytes: int = 0


@asynccontextmanager
async def _observed(table: Table, scenario: str, name: str, pid: int | None) -> AsyncIterator[_Seen]:
    """Notes what the scenario cost the process tree, and how far its memory grew meanwhile."""
    seen = _Seen()
    before = tree_cost(pid) if pid else None
    async with asyncio.TaskGroup() as group:
        looker = group.create_task(_look_at_memory(seen, pid)) if pid else None
        yield seen
        if looker is not None:
            looker.cancel()
    tally = table.setdefault(scenario, {}).setdefault(name, Tally())
    if pid and before:
        tally.add(seen.load, tree_cost(pid).cpu_s - before.cpu_s, max(0, seen.peak_bytes - before.resident_bytes))
    else:
        tally.add(seen.load, 0.0, 0)


async def _look_at_memory(seen: _Seen, pid: int) -> None:
    while True:
        await asyncio.sleep(0.25)
        seen.peak_bytes = max(seen.peak_bytes, tree_cost(pid).resident_bytes)


def _body(size: int, *, stream: bool, events: int) -> str:
    """A chat completion of about that many bytes; what the backend looks at stands first."""
    body = {"stream": stream, "max_tokens": events, "model": MODEL, "messages": [{"role": "user", "content": ""}]}
    body["messages"] = [{"role": "user", "content": "word " * ((size - len(json.dumps(body))) // 5)}]
    return json.dumps(body)


def summary(table: Table, plan: Plan) -> dict[str, Any]:
    """The figures, by scenario and proxy. `added` is over direct, at the same percentile."""
    return {
        "plan": {"events": plan.events, "rate": plan.rate, "requests": plan.requests, "rounds": plan.rounds},
        "scenarios": {
            scenario: {name: _row(scenario, tally, rows[DIRECT]) for name, tally in rows.items()} for scenario, rows in table.items()
        },
    }


def _row(scenario: str, tally: Tally, direct: Tally) -> dict[str, Any]:
    load = tally.load
    row: dict[str, Any] = {"errors": len(load.errors), "first_error": load.errors[0] if load.errors else None}
    if scenario.startswith("streams"):
        streams = load.requests / max(1, len(tally.grown_bytes))
        return row | {
            "cpu_us_per_chunk": _each_us(tally.cpu_s, load.events),
            "added_ttft_ms": _added(load.ttft_s, direct.load.ttft_s),
            "added_gap_ms": _added(load.gaps_s, direct.load.gaps_s),
            "kb_per_stream": round(max(tally.grown_bytes, default=0) / 1024 / streams, 1) if streams else None,
        }
    return row | {
        "cpu_us_per_request": _each_us(tally.cpu_s, load.requests),
        "added_latency_ms": _added(load.latency_s, direct.load.latency_s),
        "requests_per_s": round(statistics.median(tally.per_second), 1) if tally.per_second else None,
    }


def _each_us(cpu_s: float, count: int) -> float | None:
    return round(cpu_s * 1e6 / count, 1) if count and cpu_s else None


def _added(values: Sequence[float], direct: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": _added_ms(values, direct, percent) for percent in (50, 99)}


def _added_ms(values: Sequence[float], direct: Sequence[float], percent: int) -> float | None:
    if not values or not direct:
        return None
    return round((percentile(values, percent) - percentile(direct, percent)) * 1e3, 3)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * int(percent) // 100) - 1))]


def as_text(shown: dict[str, Any]) -> str:
    """The figures as one table for each scenario."""
    lines = []
    for scenario, rows in shown["scenarios"].items():
        lines.append(f"\n{scenario}")
        for name, row in rows.items():
            figures = ", ".join(f"{key} {value}" for key, value in row.items() if value not in (None, 0, {"p50": 0.0, "p99": 0.0}))
            lines.append(f"  {name:18} {figures or '-'}")
    return "\n".join(lines)
