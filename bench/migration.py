"""`midstream bench migration`: what a move costs, at the gateway's client, on real engines.

For each prompt length, in interleaved rounds on one fleet: an unmoved stream, and one moved live, by stop-and-copy and by recompute in its
middle. Downtime is the gap between the last event before the hand-over and the first after it; it holds one decode step in any case.
Beside it: how other requests' decoding suffers during the copy, and what the gateway adds to an unmoved stream.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.fleet import BenchFleet, open_fleet
from bench.stream import Seen, prompt_of, run_stream
from deploy.up import UpOptions

MODES = ("live", "stop_copy", "recompute")
MOVE_AFTER = 20
TOKENS_AROUND = 50
BYSTANDER_TOKENS = 3000
"""More than they get to decode: they are cut off when the move is over."""
WARM_TOKENS = 64


@dataclass(slots=True)
class Length:
    """What was measured for one prompt length."""

    prompt_tokens: int
    usual_ms: list[float] = field(default_factory=list)
    downtime_ms: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    stages: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    identical: bool = True
    bystanders: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "moves_per_mode": min((len(values) for values in self.downtime_ms.values()), default=0),
            "stages": max(self.stages, default=0),
            "bytes": round(statistics.median(self.bytes)) if self.bytes else 0,
            "identical": self.identical,
            "token_gap_ms": {"usual_p50": _round(_percentile(self.usual_ms, 50)), "usual_p99": _round(_percentile(self.usual_ms, 99))},
            "downtime_ms": {mode: _round(_median(values)) for mode, values in self.downtime_ms.items()},
            "downtime_worst_ms": {mode: _round(max(values, default=0.0)) for mode, values in self.downtime_ms.items()},
            "bystander_slowdown": round(_median(self.bystanders), 3) if self.bystanders else None,
            "failures": self.failures,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if every stream was whole and every moved text identical."""
    parser = argparse.ArgumentParser(prog="midstream bench migration", description="Measure what moving a running request costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="kind of engine (default: %(default)s)")
    parser.add_argument("--model", help="model to load (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", default="256,1024,4096", help="prompt lengths in tokens (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=5, help="moves per prompt length and mode (default: %(default)s)")
    options = parser.parse_args(argv)
    prompts = [int(tokens) for tokens in options.prompts.split(",")]
    report = asyncio.run(measure(UpOptions(engine=options.engine, model=options.model), prompts, options.moves))
    print(json.dumps(report) if options.json else table(report))
    whole = all(length["identical"] and not length["failures"] for length in report["results"])
    return 0 if whole else 1


async def measure(options: UpOptions, prompts: Sequence[int], moves: int) -> dict[str, Any]:
    """The whole report, as JSON-able values."""
    async with open_fleet(options) as fleet, httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=50)) as client:
        bench = _Bench(fleet, client)
        await bench.warm()
        lengths = [Length(tokens) for tokens in prompts]
        for number in range(moves):
            for length in lengths:
                print(f"round {number + 1} of {moves}: prompt of {length.prompt_tokens} tokens", file=sys.stderr, flush=True)
                await bench.round(length)
        for length in lengths:
            await bench.bystanders(length, moves)
        overhead = await bench.overhead(rounds=4 * moves)
    first, last = lengths[0].downtime_ms["live"], lengths[-1].downtime_ms["live"]
    return {
        "engine": fleet.engine,
        "model": fleet.model,
        "results": [length.as_json() for length in lengths],
        "flatness": round(_median(last) / _median(first), 3) if first and last else None,
        "gateway": overhead,
    }


class _Bench:
    """The measurements, on one fleet."""

    def __init__(self, fleet: BenchFleet, client: httpx.AsyncClient) -> None:
        self._fleet, self._client = fleet, client
        self._runs = 0

    async def stream(self, prompt: Sequence[int], max_tokens: int, *, url: str | None = None, **more: Any) -> Seen:
        self._runs += 1
        salt = f"bench-{self._runs}"  # no run profits from another's prefix
        return await run_stream(self._client, url or self._fleet.gateway, self._fleet.model, prompt, max_tokens, salt=salt, **more)

    async def warm(self) -> None:
        """First uses are slow: both engines, both directions of the channel."""
        for _ in range(2):
            for url in self._fleet.backends.values():
                await self.stream(prompt_of(WARM_TOKENS), 16, url=url)
            for _ in self._fleet.backends:
                await self.stream(prompt_of(WARM_TOKENS), 60, move_after=10)

    async def round(self, length: Length) -> None:
        prompt, tokens = prompt_of(length.prompt_tokens), MOVE_AFTER + TOKENS_AROUND
        unmoved = await self.stream(prompt, tokens)
        length.usual_ms += unmoved.gaps_ms()
        for mode in MODES:
            moved = await self.stream(prompt, tokens, move_after=MOVE_AFTER, mode=mode)
            outcome = moved.outcome or {}
            if outcome.get("outcome") != "moved" or not moved.done:
                length.failures.append(f"{mode}: {outcome}")
                continue
            length.downtime_ms[mode].append(moved.downtime_ms)
            length.identical = length.identical and moved.text == unmoved.text
            if mode == "live":
                length.stages.append(int(outcome["stages"]))
                length.bytes.append(int(outcome["bytes"]))

    async def bystanders(self, length: Length, moves: int) -> None:
        """Token gaps of a small request on each engine, while the long one is copied against while it just decodes beside them."""
        for number in range(moves):
            watched = {instance: Seen() for instance in self._fleet.backends}
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.stream(prompt_of(48, 1 + number), BYSTANDER_TOKENS, url=url, seen=watched[instance]))
                    for instance, url in self._fleet.backends.items()
                ]
                prompt, tokens = prompt_of(length.prompt_tokens, 2 + number), 2 * MOVE_AFTER + TOKENS_AROUND
                moved = await self.stream(prompt, tokens, move_after=2 * MOVE_AFTER)
                for task in tasks:
                    task.cancel()
            outcome = moved.outcome or {}
            if outcome.get("outcome") != "moved":
                length.failures.append(f"bystanders: {outcome}")
                continue
            length.bystanders += _slowdowns(moved, watched)

    async def overhead(self, rounds: int) -> dict[str, float]:
        """What the gateway adds to an unmoved stream, against the engines asked directly, turn by turn.

        An engine that stood idle is slower, and the gateway is free to choose: so both have just worked before each turn.
        """
        direct = list(self._fleet.backends.values())
        ttft: dict[str, list[float]] = {"direct": [], "gateway": []}
        gaps: dict[str, list[float]] = {"direct": [], "gateway": []}
        for number in range(rounds):
            asked = direct[number % len(direct)]
            for way, url in (("direct", asked), ("gateway", self._fleet.gateway)):
                async with asyncio.TaskGroup() as group:
                    for warmed in direct:
                        group.create_task(self.stream(prompt_of(WARM_TOKENS, 8), 4, url=warmed))
                seen = await self.stream(prompt_of(WARM_TOKENS, 9), 24, url=url)
                ttft[way].append(seen.ttft_ms)
                gaps[way] += seen.gaps_ms()
        return {
            "ttft_direct_ms": _round(_median(ttft["direct"])),
            "ttft_added_ms": _round(_median(ttft["gateway"]) - _median(ttft["direct"])),
            "gap_direct_ms": _round(_median(gaps["direct"])),
            "gap_ratio": round(_median(gaps["gateway"]) / _median(gaps["direct"]), 3),
        }


def _slowdowns(moved: Seen, watched: dict[str, Seen]) -> list[float]:
    """Mean gap during the copy over the median gap before it, for each bystander; the step of the hand-over left out."""
    outcome = moved.outcome or {}
    copied_s = moved.ordered_s + (float(outcome["total_ms"]) - float(outcome["frozen_ms"])) / 1e3
    ratios = []
    for seen in watched.values():
        before = seen.gaps_ms(moved.at_s[2], moved.ordered_s)
        during = seen.gaps_ms(moved.ordered_s, copied_s)
        if len(before) >= 5 and during:
            ratios.append(statistics.fmean(during) / _median(before))
    return ratios


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    columns = ("prompt", "stages", "MB", "same", "gap p50", "live", "stop+copy", "recompute", "bystanders")
    rows: list[tuple[str, ...]] = [columns]
    for row in report["results"]:
        down, same = row["downtime_ms"], "yes" if row["identical"] else "NO"
        figures = (row["prompt_tokens"], row["stages"], f"{row['bytes'] / 1e6:.1f}", same, row["token_gap_ms"]["usual_p50"])
        rows.append(tuple(str(one) for one in (*figures, *(down[mode] for mode in MODES), row["bystander_slowdown"])))
    lines = [f"{report['engine']}, {report['model']}: milliseconds at the gateway's client, medians"]
    lines += ["".join(f"{cell:>11}" for cell in row) for row in rows]
    lines.append(f"live downtime, longest prompt over shortest: {report['flatness']}")
    lines.append(f"gateway against direct: {report['gateway']}")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else float("nan")


def _round(value: float) -> float:
    return round(value, 1)


if __name__ == "__main__":
    sys.exit(main())
