"""`midstream chaos`: faults at random moments on a real fleet, and what became of every stream."""

import asyncio
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from backend.peers.environment import read_or_exit
from bench.chaos.fleet import open_fleet
from bench.chaos.pace import PACES
from bench.chaos.run import Run
from deploy.settings import DeploySettings
from deploy.up import UpOptions, choose_model

GATEWAYS = 2
BACKENDS = {"fake": 4, "vllm": 2}
MUST_BE_ZERO = ("wrong", "lost", "truncated")


def execute(engine: str, iterations: int, seed: int, logs: str | None, *, as_json: bool) -> int:
    """Run and print; 0 if every stream was right and nothing is left held. The processes' logs are kept in `logs`, if given."""
    with tempfile.TemporaryDirectory(prefix="midstream-chaos-") as scratch:
        report = asyncio.run(run(engine, iterations, seed, Path(logs or scratch)))
    print(json.dumps(report) if as_json else "\n".join(f"{name}: {value}" for name, value in report.items()))
    return 0 if is_clean(report) else 1


async def run(engine: str, iterations: int, seed: int, logs: Path) -> dict[str, Any]:
    """The report, as JSON-able values. Standard error tells of every stream that was not right."""
    options = UpOptions(engine=engine, instances=BACKENDS[engine])
    with redirect_stdout(sys.stderr):  # what the launcher says is no part of the report
        model = await asyncio.to_thread(choose_model, options, read_or_exit(DeploySettings))
        async with open_fleet(logs, options, model, gateways=GATEWAYS, pace=PACES[engine]) as fleet:
            return await Run(fleet).all(seed, iterations)


def is_clean(report: dict[str, Any]) -> bool:
    """Whether it is what it must be."""
    return not any(report[name] for name in MUST_BE_ZERO) and not any(report["leaked"].values())
