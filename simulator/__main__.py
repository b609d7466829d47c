"""`python -m simulator`, and what `midstream simulate` runs: reads files, prints tables."""

import argparse
import asyncio
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from urllib.request import Request, urlopen

from simulator.calibration import agreements, engine_environment
from simulator.calibration import table as agreement_table
from simulator.comparison import NAMES, Figures, ratios
from simulator.live_cluster import as_measured
from simulator.outcome import PER_REQUEST_HEADER, Outcome, Spread, mean
from simulator.paper import command
from simulator.paper.command import PaperOptions
from simulator.parity import ParityError, check, entries_of
from simulator.plan import Objectives, needs, picture
from simulator.replay import ReplayError, Target, play
from simulator.request_trace import trace_of
from simulator.run import arrivals_of, simulate
from simulator.scenario import Scenario, ScenarioError, policy_named
from simulator.scenario_file import load, read_scenario
from simulator.workload import TraceError, csv_rows


def run_simulate(scenario_file: Path, trace_file: Path | None, per_request_file: Path | None, *, as_json: bool) -> int:
    """Simulate and print. Answers the exit status: 2 if the scenario or the trace cannot be read."""
    try:
        scenario, arrivals = load(scenario_file, trace_file)
        outcome = simulate(scenario, arrivals, perf_counter)
        if per_request_file is not None:
            with per_request_file.open("w", newline="") as file:
                csv.writer(file).writerows((PER_REQUEST_HEADER, *(each.row() for each in outcome.requests)))
    except (OSError, ScenarioError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(outcome.to_json()) if as_json else table(scenario, outcome))
    return 0


def run_plan(
    scenario_file: Path,
    trace_file: Path | None,
    objectives: Objectives,
    policies: Sequence[str],
    max_instances: int,
    picture_file: Path | None,
    *,
    as_json: bool,
) -> int:
    """How many instances each policy needs. Answers the exit status: 1 if one of them needs more than allowed, 2 if nothing can be run."""
    try:
        scenario, arrivals = load(scenario_file, trace_file)
        configs = [scenario.policy if name == scenario.policy.name else policy_named(name) for name in policies]
        rows = needs(scenario, arrivals, objectives, configs, max_instances, perf_counter)
        if picture_file is not None:
            picture_file.write_text(picture(rows, max_instances))
    except (OSError, ScenarioError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"{'policy':20}{'instances':>10}{'TTFT P99':>10}{'TPOT P99':>10}{'end to end':>12}")
        for row in rows:
            count = str(row.instances) if row.instances is not None else f"> {max_instances}"
            print(f"{row.policy:20}{count:>10}{row.ttft_p99_s:10.3f}{row.tpot_p99_s:10.3f}{row.e2e_mean_s:12.3f}")
    return 1 if any(row.instances is None for row in rows) else 0


def run_compare(scenario_file: Path, against: str, policies: Sequence[str], seeds: Sequence[int]) -> int:
    """Print each policy's figures divided by those of `against`. Answers the exit status."""
    try:
        scenario = read_scenario(scenario_file)
        measured: dict[str, list[Figures]] = {}
        for name in (against, *policies):
            policy = scenario.policy if name == scenario.policy.name else policy_named(name)
            for seed in seeds:
                one = replace(scenario, policy=policy, workload=replace(scenario.workload, seed=seed))
                outcome = simulate(one, arrivals_of(one), perf_counter)
                measured.setdefault(name, []).append(Figures.of(outcome))
    except (OSError, ScenarioError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'':20}" + "".join(f"{name:>13}" for name in NAMES))
    base = measured[against]
    middle = (mean(column) for column in zip(*(figures.values() for figures in base), strict=True))
    print(f"{against + ' (s)':20}" + "".join(f"{value:13.3f}" for value in middle))
    for name in policies:
        print(f"{name:20}" + "".join(f"{ratio:12.2f}x" for ratio in ratios(measured[name], base)))
    return 0


def run_paper(options: PaperOptions, *, as_json: bool) -> int:
    """Run the paper's experiments, write what they found, print the tables. Answers the exit status."""

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {of} simulations", end="\n" if done == of else "", file=sys.stderr, flush=True)

    try:
        sections = command.run(options, progress)
    except (OSError, ScenarioError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps({table.name: table.to_json() for section in sections for table in section.tables}))
    else:
        print("\n".join(table.markdown() for section in sections for table in section.tables))
    return 0


def run_replay(
    scenario_file: Path, trace_file: Path | None, target: Target | None, time_scale: float, *, measured: bool, as_json: bool
) -> int:
    """Play and compare; without a target, print the engines' environment. `measured`: simulate the cluster that was played to, by what
    its engines say of themselves, instead of the scenario's. Answers the exit status: 1 if the two do not agree."""
    try:
        scenario, arrivals = load(scenario_file, trace_file)
        if target is None:
            print("\n".join(f"{name}={value}" for name, value in engine_environment(scenario, time_scale).items()))
            return 0
        simulated = None if measured else simulate(scenario, arrivals, perf_counter)
        played = asyncio.run(play(target, arrivals, time_scale, scenario.workload.seed, perf_counter))
        if simulated is None:
            scenario = as_measured(scenario, fetch(target.url, "/admin/instances", target.key), time_scale)
            simulated = simulate(scenario, arrivals, perf_counter)
    except (OSError, ScenarioError, TraceError, ReplayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = agreements(played.measured, time_scale, simulated)
    answered = len(played.measured) - len(played.failures)
    if as_json:
        shown = [{**asdict(row), "deviation": row.deviation, "within": row.within()} for row in rows]
        print(json.dumps({"requests": answered, "failures": list(played.failures), "means": shown}))
    else:
        print(agreement_table(rows))
        print(f"{answered} requests answered, {len(played.failures)} not" + "".join(f"\n  {each}" for each in played.failures[:5]))
    return 0 if all(row.within() for row in rows) and not played.failures else 1


def run_parity(source: str, key: str | None, *, as_json: bool) -> int:
    """Make a gateway's decisions again; `source` is a file or the gateway's URL. Answers the exit status: 1 if one comes out otherwise."""
    try:
        if source.startswith(("http://", "https://")):
            text = fetch(source, "/admin/decisions?limit=10000", key).decode()
        else:
            text = Path(source).read_text(encoding="utf-8")
        parity = check(entries_of(text))
    except (OSError, UnicodeDecodeError, ParityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(parity.to_json()))
    else:
        made = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(parity.replayed.items()))
        print(f"{made or 'none'} made again; {len(parity.differing)} came out otherwise; {len(parity.unread)} could not be read")
        for entry in parity.differing[:5]:
            print(f"  number {entry.get('number')}, {entry.get('kind')} at {entry.get('at')}")
    return 0 if parity.holds else 1


def fetch(url: str, path: str, key: str | None) -> bytes:
    """What the gateway answers there. Raises OSError."""
    asked = Request(f"{url.rstrip('/')}{path}", headers={"authorization": f"Bearer {key}"} if key else {})
    with urlopen(asked, timeout=30) as answer:  # the caller has looked at the scheme
        return bytes(answer.read())


def run_trace(log_file: Path) -> int:
    """Print the trace of a request log. Answers the exit status."""
    try:
        with log_file.open(encoding="utf-8") as file:
            trace = trace_of(file)
    except (OSError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    csv.writer(sys.stdout, lineterminator="\n").writerows(csv_rows(trace.arrivals))
    if trace.skipped:
        print(f"{trace.skipped} requests without a token are left out", file=sys.stderr)
    return 0


def table(scenario: Scenario, outcome: Outcome) -> str:
    """The summary for people."""
    lines = [f"{scenario.policy.name}: {len(outcome.requests)} requests, {outcome.instances_mean:.1f} instances in the mean", ""]
    lines.append(f"{'seconds':24}{'mean':>10}{'P50':>10}{'P99':>10}")
    tiers = sorted({each.tier for each in outcome.requests})
    for tier in [None, *tiers] if len(tiers) > 1 else [None]:
        chosen = [each for each in outcome.requests if tier in (None, each.tier)]
        measured = (
            ("first token", [each.ttft_s for each in chosen]),
            ("each next token", [each.tpot_s for each in chosen if each.tpot_s is not None]),
            ("end to end", [each.e2e_s for each in chosen]),
        )
        for name, values in measured:
            spread = Spread.of(values)
            label = name if tier is None else f"{name}, {tier}"
            lines.append(f"{label:24}{spread.mean:10.3f}{spread.p50:10.3f}{spread.p99:10.3f}")
    summary = outcome.to_json()
    lines += [
        "",
        f"preemptions {summary['preemptions']}, loss {summary['preemption_loss_s']:.3f} s a request; migrations {outcome.migrations}; "
        f"fragmented memory {100 * mean(outcome.fragmentation):.2f} %; simulated in {outcome.wall_s:.1f} s",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags and run."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description="Simulate a cluster; see docs/simulator.md.")
    parser.add_argument("scenario", type=Path, help="scenario file (TOML), or the name of one that comes with Midstream")
    parser.add_argument("--trace", type=Path, metavar="FILE.csv", help="arrivals, in place of the scenario's own")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--per-request", type=Path, metavar="FILE.csv", help="write what befell each request")
    options = parser.parse_args(argv)
    return run_simulate(options.scenario, options.trace, options.per_request, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
