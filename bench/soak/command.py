"""`midstream soak`: constant mixed load on a fleet of fake engines, and whether memory or descriptors grow."""

import asyncio
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.chaos.fleet import open_fleet
from bench.chaos.pace import SOAK
from bench.soak.run import Soak, dumped, is_clean
from deploy.up import Model, UpOptions

BACKENDS, GATEWAYS = 4, 2


def execute(minutes: float, seed: int, *, as_json: bool) -> int:
    """Run and print; 0 if every answer was right, nothing is left held and nothing grows."""
    with tempfile.TemporaryDirectory(prefix="midstream-soak-") as logs:
        report = asyncio.run(run(minutes, seed, Path(logs)))
    print(dumped(report, as_json=as_json))
    return 0 if is_clean(report) else 1


async def run(minutes: float, seed: int, logs: Path) -> dict[str, Any]:
    """The report, as JSON-able values."""
    options = UpOptions(engine="fake", instances=BACKENDS)
    with redirect_stdout(sys.stderr):  # what the launcher says is no part of the report
        async with open_fleet(logs, options, Model("fake", "fake"), gateways=GATEWAYS, pace=SOAK) as fleet:
            return await Soak(fleet, seed).all(minutes)
