"""`midstream bench tiers`: what a stream of high priority feels of the batch load that arrives beside it.

A high-priority stream decodes alone for a while; then batch requests with long prompts come, one after the other. Measured, in turns on the
same engines: its token gaps before and during that load, with the product as it is, with tiers but no migration, and with `round_robin`.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.arena import WAYS, Arena, open_arena
from bench.stream import Seen, prompt_of, run_stream
from deploy.up import UpOptions
from simulator.bars import Bar, bars

ALONE_TOKENS = 30
"""Tokens of the urgent stream before the load comes."""
BATCH_REQUESTS = 6
BATCH_PROMPT, BATCH_OUTPUT = 768, 60
BATCH_EVERY_S = 0.75
URGENT_PROMPT, URGENT_TOKENS = 64, 200


@dataclass(slots=True)
class Measured:
    """One way's rounds: the urgent stream's gaps, and how long the batch took to its last token."""

    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    stalled_ms: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "alone_gap_ms": _spread(self.alone_ms),
            "beside_gap_ms": _spread(self.beside_ms),
            "mean_gap_ratio": {"median": _median(self.ratios), "worst": round(max(self.ratios, default=0.0), 2)},
            "longest_gap_ms": {"median": _median(self.stalled_ms), "worst": round(max(self.stalled_ms, default=0.0), 1)},
            "batch_s": {"median": _median(self.batch_s)},
            "failures": self.failures,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if every stream was whole."""
    parser = argparse.ArgumentParser(prog="midstream bench tiers", description="Measure what batch load does to an urgent stream.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="kind of engine (default: %(default)s)")
    parser.add_argument("--model", help="model to load (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="also write the result as an SVG picture to this file")
    options = parser.parse_args(argv)
    report = asyncio.run(measure(UpOptions(engine=options.engine, model=options.model), options.rounds))
    if options.picture:
        options.picture.write_text(picture(report))
    print(json.dumps(report) if options.json else table(report))
    return 0 if not any(way["failures"] for way in report["ways"].values()) else 1


async def measure(options: UpOptions, rounds: int) -> dict[str, Any]:
    """The whole report, as JSON-able values."""
    measured = {way: Measured() for way in WAYS}
    async with open_arena(options) as arena, httpx.AsyncClient(timeout=600) as client:
        for url in arena.backends.values():
            await run_stream(client, url, arena.model, prompt_of(64), 16, salt="warm")
        for number in range(rounds):
            for way, environment in WAYS.items():
                print(f"round {number + 1} of {rounds}: {way}", file=sys.stderr, flush=True)
                async with arena.gateway(environment) as url:
                    await _round(arena, client, url, number, measured[way])
                await arena.wait_idle(client)
    return {
        "engine": arena.engine,
        "model": arena.model,
        "batch_requests": BATCH_REQUESTS,
        "batch_prompt_tokens": BATCH_PROMPT,
        "ways": {way: one.as_json() for way, one in measured.items()},
    }


async def _round(arena: Arena, client: httpx.AsyncClient, url: str, number: int, measured: Measured) -> None:
    urgent, salt = Seen(), f"{number}-{url.rpartition(':')[2]}"
    batch = [Seen() for _ in range(BATCH_REQUESTS)]
    async with asyncio.TaskGroup() as group:
        prompt = prompt_of(URGENT_PROMPT, number)
        group.create_task(run_stream(client, url, arena.model, prompt, URGENT_TOKENS, salt=f"u-{salt}", priority="high", seen=urgent))
        await urgent.wait_tokens(ALONE_TOKENS)
        for index, seen in enumerate(batch):
            prompt = prompt_of(BATCH_PROMPT, 10 * number + index + 1)
            group.create_task(
                run_stream(client, url, arena.model, prompt, BATCH_OUTPUT, salt=f"b{index}-{salt}", priority="batch", seen=seen)
            )
            await asyncio.sleep(BATCH_EVERY_S)
    _note(measured, urgent, batch)


def _note(measured: Measured, urgent: Seen, batch: Sequence[Seen]) -> None:
    starts_s, ends_s = batch[0].started_s, max(seen.at_s[-1] for seen in batch)
    alone, beside = urgent.gaps_ms(urgent.at_s[1], starts_s), urgent.gaps_ms(starts_s, ends_s)
    measured.failures += ["a stream is not whole" for seen in (urgent, *batch) if not seen.done]
    if not alone or not beside:
        measured.failures.append("the urgent stream and the load were not there together")
        return
    measured.alone_ms += alone
    measured.beside_ms += beside
    measured.ratios.append(statistics.fmean(beside) / statistics.fmean(alone))
    measured.stalled_ms.append(max(beside))
    measured.batch_s.append(ends_s - starts_s)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['engine']}, {report['model']}: token gaps of an urgent stream, ms, alone and beside batch load"]
    lines.append(f"{'':>26}{'alone p50':>11}{'beside p50':>12}{'p99':>9}{'mean ratio':>12}{'longest':>10}{'batch s':>9}")
    for way, one in report["ways"].items():
        alone, beside = one["alone_gap_ms"], one["beside_gap_ms"]
        figures = f"{alone['p50']:>11}{beside['p50']:>12}{beside['p99']:>9}{one['mean_gap_ratio']['median']:>12}"
        lines.append(f"{way:>26}{figures}{one['longest_gap_ms']['median']:>10}{one['batch_s']['median']:>9}")
    return "\n".join(lines)


def picture(report: dict[str, Any]) -> str:
    """How many times its unloaded value the urgent stream's mean gap is, as bars."""
    rows = [Bar("alone", 1.0, "1.00 x")]
    for way, one in report["ways"].items():
        ratio = one["mean_gap_ratio"]["median"]
        rows.append(Bar(way, ratio, f"{ratio:.2f} x", way == "midstream"))
    return bars("Mean token gap of a high-priority stream while batch load arrives", rows)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2) if values else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    pick = (
        {name: ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for name, percent in (("p50", 50), ("p99", 99))}
        if ordered
        else {}
    )
    return {name: round(value, 1) for name, value in pick.items()}


if __name__ == "__main__":
    sys.exit(main())
