"""The sub-commands of `midstream` about simulations. Only what one needs is imported."""

import argparse
import sys

from deploy.arguments import Commands, numbers, positive, scale, server


def add_simulator(commands: Commands) -> None:
    """All of them."""
    for add in (add_simulate, add_plan, add_compare, add_paper, add_replay, add_trace):
        add(commands)


def add_simulate(commands: Commands) -> None:
    description = "Run the product's own policies over modelled engines, in virtual time. Scenarios: docs/simulator.md."
    parser = commands.add_parser("simulate", help="simulate a cluster", description=description)
    parser.add_argument(
        "scenario",
        metavar="SCENARIO.toml",
        help="what to simulate: a file, or the name of a scenario that comes with Midstream (s-s, priorities, ...)",
    )
    parser.add_argument("--trace", metavar="FILE.csv", help="arrivals, in place of the scenario's own")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--per-request", metavar="FILE.csv", help="write what befell each request")
    parser.set_defaults(run=run_simulate)


def add_plan(commands: Commands) -> None:
    description = "How many instances a workload needs to meet its objectives, by policy: simulates until it knows."
    parser = commands.add_parser("plan", help="how many instances are needed", description=description)
    parser.add_argument("scenario", metavar="SCENARIO.toml", help="cluster, costs and workload")
    parser.add_argument("--trace", metavar="FILE.csv", help="arrivals, in place of the scenario's own")
    parser.add_argument("--ttft-p99", type=float, default=5.0, metavar="S", help="seconds to the first token (default: %(default)s)")
    parser.add_argument("--tpot-p99", type=float, default=0.2, metavar="S", help="seconds per further token (default: %(default)s)")
    parser.add_argument("--policies", default="round_robin,llumnix,midstream", metavar="A,B", help="default: %(default)s")
    parser.add_argument("--max-instances", type=positive, default=64, metavar="N", help="most instances to try (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the answer")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run_plan)


def add_compare(commands: Commands) -> None:
    description = "Simulate a scenario under several policies, and print what each one's figures are of another's."
    parser = commands.add_parser("compare", help="compare policies", description=description)
    parser.add_argument("scenario", metavar="SCENARIO.toml", help="cluster, costs and workload (a named trace)")
    parser.add_argument("--against", default="llumnix", metavar="POLICY", help="what the others are divided by (default: %(default)s)")
    parser.add_argument("--policies", default="round_robin,infaas,midstream", metavar="A,B", help="default: %(default)s")
    parser.add_argument(
        "--seeds", type=numbers, default=(1,), metavar="N,N", help="workloads to run; the ratios' geometric mean is shown (default: 1)"
    )
    parser.set_defaults(run=run_compare)


def add_paper(commands: Commands) -> None:
    description = "Run the paper's experiments in the simulator; write tables, pictures and a page. Goes on where it was stopped."
    parser = commands.add_parser("paper", help="run the paper's evaluation", description=description)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer rates and requests: 43 simulations instead of 596")
    parser.add_argument("--out", default="paper-out", metavar="DIR", help="where results go, and are looked for (default: %(default)s)")
    parser.add_argument("--experiments", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--seeds", type=numbers, metavar="N,N", help="workloads to run (default: 1,2,3; with --quick: 1)")
    parser.add_argument("--requests", type=positive, metavar="N", help="requests a run (default: 10000; with --quick: 2500)")
    parser.add_argument("--processes", type=positive, metavar="N", help="simulations at a time (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.set_defaults(run=run_paper)


def add_replay(commands: Commands) -> None:
    description = "Play a scenario's workload to a gateway, and compare what its clients see with the simulation (docs/simulator.md)."
    parser = commands.add_parser("replay", help="compare the simulator with a live gateway", description=description)
    parser.add_argument("scenario", metavar="SCENARIO.toml", nargs="?", help="cluster, costs, policy and workload")
    parser.add_argument("--url", type=server, metavar="GATEWAY", help="base URL of the gateway")
    parser.add_argument(
        "--decisions",
        metavar="LOG|GATEWAY",
        help="instead: make the decisions of a gateway again, of its log or its /admin/decisions, and say whether the same comes out",
    )
    parser.add_argument("--trace", metavar="FILE.csv", help="arrivals, in place of the scenario's own")
    parser.add_argument("--model", default="fake", help="model to ask for (default: %(default)s)")
    parser.add_argument("--key", metavar="KEY", help="bearer token, if the gateway wants one (with --decisions: the admin token)")
    parser.add_argument("--time-scale", type=scale, default=1.0, metavar="X", help="live seconds for each of the scenario's (default: 1)")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="simulate the cluster that was played to, by its memory and what its engines have measured, instead of the scenario's",
    )
    parser.add_argument("--engine-env", action="store_true", help="print the environment of fake engines that are the scenario's, and stop")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=run_replay)


def add_trace(commands: Commands) -> None:
    description = "Turn a gateway's request log (MIDSTREAM_REQUEST_LOG) into a trace for simulate, plan and replay, on standard output."
    parser = commands.add_parser("trace", help="a trace of a gateway's request log", description=description)
    parser.add_argument("log", metavar="LOG.jsonl", help="the log")
    parser.set_defaults(run=run_trace)


def run_simulate(options: argparse.Namespace) -> int:
    from pathlib import Path

    from simulator import __main__ as simulator

    trace, per_request = (Path(name) if name else None for name in (options.trace, options.per_request))
    return simulator.run_simulate(Path(options.scenario), trace, per_request, as_json=options.json)


def run_plan(options: argparse.Namespace) -> int:
    from pathlib import Path

    from simulator import __main__ as simulator
    from simulator.plan import Objectives

    trace, picture = (Path(name) if name else None for name in (options.trace, options.picture))
    objectives = Objectives(options.ttft_p99, options.tpot_p99)
    policies = options.policies.split(",")
    return simulator.run_plan(Path(options.scenario), trace, objectives, policies, options.max_instances, picture, as_json=options.json)


def run_compare(options: argparse.Namespace) -> int:
    from pathlib import Path

    from simulator import __main__ as simulator

    return simulator.run_compare(Path(options.scenario), options.against, options.policies.split(","), options.seeds)


def run_paper(options: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from simulator import __main__ as simulator
    from simulator.paper.command import PaperOptions
    from simulator.paper.experiment import Plan

    seeds = options.seeds or ((1,) if options.quick else (1, 2, 3))
    plan = Plan(seeds, options.requests or (2500 if options.quick else 10_000), options.quick)
    experiments = tuple(options.experiments.split(",")) if options.experiments else ()
    asked = PaperOptions(plan, Path(options.out), experiments, options.processes or os.cpu_count() or 1)
    return simulator.run_paper(asked, as_json=options.json)


def run_replay(options: argparse.Namespace) -> int:
    from pathlib import Path

    from simulator import __main__ as simulator
    from simulator.replay import Target

    if options.decisions:
        return simulator.run_parity(options.decisions, options.key, as_json=options.json)
    if options.scenario is None:
        print("error: a scenario is needed", file=sys.stderr)
        return 2
    if not options.engine_env and options.url is None:
        print("error: --url is needed: where the gateway is", file=sys.stderr)
        return 2
    trace = Path(options.trace) if options.trace else None
    target = None if options.engine_env else Target(options.url, options.model, options.key)
    return simulator.run_replay(Path(options.scenario), trace, target, options.time_scale, measured=options.measured, as_json=options.json)


def run_trace(options: argparse.Namespace) -> int:
    from pathlib import Path

    from simulator import __main__ as simulator

    return simulator.run_trace(Path(options.log))
