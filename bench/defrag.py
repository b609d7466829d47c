"""`midstream bench defrag`: a long prompt that no instance has room for, though all together have.

Each engine is filled with a few requests that go on for long, so that the free memory is in pieces. Then a prompt comes that fits into none
of them. Measured, in turns on the same engines: its time to first token with the product as it is, with migration off, and with
`round_robin`. With migration, running requests move together and make room; without, the prompt waits until some of them end.
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

BLOCKS, BLOCK_TOKENS = 72, 32
"""Each engine's memory: 2,304 tokens."""
FILLERS = 3
FILLER_PROMPT, FILLER_OUTPUT = 376, 72
LONG_PROMPT = 1568
"""In blocks: an engine has 71, a filler takes 12 to 14, the long prompt 50. It fits beside one filler and not beside two, however they were
placed; and five have room on one engine to their ends. So two have to move."""
SETTLED_TOKENS = 8
"""Output of every filler before the long prompt comes."""


@dataclass(slots=True)
class Measured:
    """One way's rounds."""

    ttft_ms: list[float] = field(default_factory=list)
    fillers_ms: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": {"median": _median(self.ttft_ms), "worst": round(max(self.ttft_ms, default=0.0), 1), "all": _rounded(self.ttft_ms)},
            "others_token_gap_ms": {"median": _median(self.fillers_ms)},
            "moved": self.moved,
            "failures": self.failures,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if every stream was whole."""
    parser = argparse.ArgumentParser(prog="midstream bench defrag", description="Measure what moving requests does for a long prompt.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help="kind of engine (default: %(default)s)")
    parser.add_argument("--model", help="model to load (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="also write the medians as an SVG picture to this file")
    options = parser.parse_args(argv)
    report = asyncio.run(measure(UpOptions(engine=options.engine, model=options.model), options.rounds))
    if options.picture:
        options.picture.write_text(picture(report))
    print(json.dumps(report) if options.json else table(report))
    return 0 if not any(way["failures"] for way in report["ways"].values()) else 1


async def measure(options: UpOptions, rounds: int) -> dict[str, Any]:
    """The whole report, as JSON-able values."""
    arguments = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str((BLOCKS - 1) * BLOCK_TOKENS), "--max-num-seqs", "16"]
    fake = {"MIDSTREAM_FAKE_CAPACITY_BLOCKS": str(BLOCKS), "MIDSTREAM_FAKE_BLOCK_TOKENS": str(BLOCK_TOKENS)}
    fake["MIDSTREAM_FAKE_MAX_MODEL_TOKENS"] = str(BLOCKS * BLOCK_TOKENS)
    measured = {way: Measured() for way in WAYS}
    async with open_arena(options, arguments, fake if options.engine == "fake" else {}) as arena, httpx.AsyncClient(timeout=600) as client:
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
        "memory_tokens": BLOCKS * BLOCK_TOKENS,
        "long_prompt_tokens": LONG_PROMPT,
        "fillers_per_instance": FILLERS,
        "ways": {way: one.as_json() for way, one in measured.items()},
    }


async def _round(arena: Arena, client: httpx.AsyncClient, url: str, number: int, measured: Measured) -> None:
    fillers = [Seen() for _ in range(FILLERS * len(arena.backends))]
    before = await _moves(arena, client)
    async with asyncio.TaskGroup() as group:
        for index, seen in enumerate(fillers):
            group.create_task(_fill(arena, client, url, index, number, seen))
        for seen in fillers:
            await seen.wait_tokens(SETTLED_TOKENS)
        salt = f"long-{number}-{url.rpartition(':')[2]}"
        long = await run_stream(client, url, arena.model, prompt_of(LONG_PROMPT, 100 + number), 8, salt=salt)
    measured.ttft_ms.append(long.ttft_ms)
    measured.moved.append(await _moves(arena, client) - before)
    measured.fillers_ms += [statistics.fmean(seen.gaps_ms()) for seen in fillers]
    if not long.done:
        measured.failures.append("the long request's stream is not whole")
    measured.failures += [f"filler {index}: not whole" for index, seen in enumerate(fillers) if not seen.done]


async def _fill(arena: Arena, client: httpx.AsyncClient, url: str, index: int, number: int, seen: Seen) -> None:
    prompt, salt = prompt_of(FILLER_PROMPT, index), f"filler-{index}-{number}-{url.rpartition(':')[2]}"
    await run_stream(client, url, arena.model, prompt, FILLER_OUTPUT, salt=salt, seen=seen)


async def _moves(arena: Arena, client: httpx.AsyncClient) -> int:
    """Requests that have moved so far, as the instances that they left count them."""
    total = 0.0
    for url in arena.backends.values():
        for line in (await client.get(f"{url}/midstream/metrics")).text.splitlines():
            if line.startswith("midstream_migrations_total{") and 'result="moved"' in line:
                total += float(line.rpartition(" ")[2])
    return round(total)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['engine']}, {report['model']}: first token of a prompt of {report['long_prompt_tokens']} tokens, ms"]
    lines.append(f"{'':>26}{'median':>10}{'worst':>10}{'others gap':>12}  moves")
    for way, one in report["ways"].items():
        ttft = one["ttft_ms"]
        lines.append(f"{way:>26}{ttft['median']:>10}{ttft['worst']:>10}{one['others_token_gap_ms']['median']:>12}  {one['moved']}")
    return "\n".join(lines)


def picture(report: dict[str, Any]) -> str:
    """Medians as bars, in seconds."""
    rows = [
        Bar(way, one["ttft_ms"]["median"] / 1e3, f"{one['ttft_ms']['median'] / 1e3:.1f} s", way == "midstream")
        for way, one in report["ways"].items()
    ]
    return bars(f"Time to first token of a prompt of {report['long_prompt_tokens']} tokens that fits on no instance", rows)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1) if values else 0.0


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


if __name__ == "__main__":
    sys.exit(main())
