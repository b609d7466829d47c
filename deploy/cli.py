"""The command `midstream`. Only what a sub-command needs is imported: `midstream --help` loads neither torch nor vllm."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from deploy.arguments import Commands, port, positive, store
from deploy.simulator_cli import add_simulator

ENGINES = ("vllm", "fake")
BENCHES = ("migration", "defrag", "tiers", "relay", "dispatch")
"""Modules of `bench` with a `main`."""
LAUNCHERS = ("process", "ray", "kubernetes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; answers the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments, passed_on = split_at_dashes(arguments)
    options = build_parser().parse_args(arguments)
    if passed_on and options.run is not run_backend:
        print(f"error: `midstream {options.command}` takes no arguments after --", file=sys.stderr)
        return 2
    options.passed_on = passed_on
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what after."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="midstream", description="An OpenAI-compatible gateway that moves running requests between engines."
    )
    parser.add_argument("--version", action="version", version=f"midstream {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_up(commands)
    add_gateway(commands)
    add_backend(commands)
    add_launcher(commands)
    add_keys(commands)
    add_bench(commands)
    add_simulator(commands)
    add_chaos(commands)
    add_soak(commands)
    return parser


def add_up(commands: Commands) -> None:
    description = "Start Redis (unless one is given), engines and the gateway on this machine, in the foreground; Ctrl-C stops all."
    parser = commands.add_parser("up", help="start everything on this machine", description=description)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="vllm, or fake: a model of an engine (default: %(default)s)")
    parser.add_argument("--instances", type=positive, default=2, metavar="N", help="how many engines (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="model for the engines (default: SmolLM2-135M-Instruct, made on first use)")
    parser.add_argument("--host", default="127.0.0.1", help="address on which the gateway listens (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="TCP port of the gateway (default: %(default)s)")
    parser.add_argument("--redis", type=store, metavar="URL", help="Redis to use (default: MIDSTREAM_REDIS_URL, else one is started)")
    parser.set_defaults(run=run_up)


def add_gateway(commands: Commands) -> None:
    description = "Run one gateway. Flags win over MIDSTREAM_... variables and .env; every other setting is read from there."
    parser = commands.add_parser("gateway", help="run a gateway", description=description)
    parser.add_argument("--host", help="address to listen on (default: MIDSTREAM_HOST, else 127.0.0.1)")
    parser.add_argument("--port", type=port, help="TCP port (default: MIDSTREAM_PORT, else 8000)")
    parser.add_argument("--redis", metavar="URL", help="shared Redis (default: MIDSTREAM_REDIS_URL; with --backend alone: none is needed)")
    parser.add_argument("--backend", action="append", metavar="URL", help="plain OpenAI server to use, such as `vllm serve` (repeatable)")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes that serve the port together (default: MIDSTREAM_WORKERS, else 1)"
    )
    parser.set_defaults(run=run_gateway)


def add_backend(commands: Commands) -> None:
    description = "Run one engine with its llumlet. Whatever follows -- is passed on to vLLM's own server."
    parser = commands.add_parser("backend", help="run an engine with its llumlet", description=description)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="kind of engine (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="model to load (needed for vllm)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8001, help="TCP port (default: %(default)s)")
    parser.add_argument("--redis", type=store, metavar="URL", help="shared Redis (default: MIDSTREAM_REDIS_URL)")
    parser.add_argument("--instance-id", metavar="ID", help="name of this instance (default: MIDSTREAM_INSTANCE_ID, else random)")
    parser.add_argument("--advertised-url", metavar="URL", help="base URL for gateways and other backends (default: http://HOST:PORT)")
    parser.set_defaults(run=run_backend)


def add_launcher(commands: Commands) -> None:
    description = "Start and stop backends when gateways ask (MIDSTREAM_LAUNCHER_URL). They outlive it: docs/scaling.md."
    parser = commands.add_parser("launcher", help="start backends when gateways ask", description=description)
    parser.add_argument("--kind", choices=LAUNCHERS, default="process", help="what backends are: processes here, Ray actors, pods")
    parser.add_argument("--namespace", default="default", help="of the actors or StatefulSets (default: %(default)s)")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: %(default)s, the one of this machine)")
    parser.add_argument("--gpus", type=float, default=0.0, metavar="N", help="GPUs of a backend, for ray (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="cores of a backend, for ray (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="kind of engine (default: %(default)s)")
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="model of backends for which none is named (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8100, help="TCP port (default: %(default)s)")
    parser.add_argument("--backend-host", default="127.0.0.1", metavar="HOST", help="address of the backends (default: %(default)s)")
    parser.add_argument("--redis", type=store, metavar="URL", help="shared Redis (default: MIDSTREAM_REDIS_URL)")
    parser.set_defaults(run=run_launcher)


def add_keys(commands: Commands) -> None:
    description = "Make, list and remove API keys. Gateways see a change of the file by themselves."
    parser = commands.add_parser("keys", help="manage API keys", description=description)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key, and print it")
    add.add_argument("name", metavar="NAME", help="what it is called in the list")
    add.add_argument("--model", action="append", metavar="MODEL", help="a model it is for; may be repeated (default: all)")
    add.add_argument("--highest-tier", metavar="TIER", help="highest tier it may ask for (default: any)")
    add.add_argument("--requests-per-minute", type=positive, metavar="N", help="default: no limit")
    add.add_argument("--tokens-per-minute", type=positive, metavar="N", help="prompts and answers together (default: no limit)")
    listing = actions.add_parser("list", help="what keys there are")
    listing.add_argument("--json", action="store_true", help="print JSON")
    remove = actions.add_parser("remove", help="make a key useless")
    remove.add_argument("name", metavar="NAME", help="its name in the list")
    for action in (add, listing, remove):
        action.add_argument("--file", metavar="FILE", help="default: MIDSTREAM_API_KEYS_FILE")
    parser.set_defaults(run=run_keys)


def add_bench(commands: Commands) -> None:
    description = "Measurements. Each takes its own flags: `midstream bench migration --help`."
    parser = commands.add_parser("bench", help="measure", description=description)
    parser.add_argument("subject", choices=BENCHES, help="what to measure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="flags of that measurement")
    parser.set_defaults(run=run_bench)


def add_chaos(commands: Commands) -> None:
    description = "Kill, stop, hang, cut off and move, at random moments, on a fleet of real processes under load; compare each stream."
    parser = commands.add_parser("chaos", help="faults under load", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--engine", choices=ENGINES, default="fake", help="kind of engine (default: %(default)s)")
    parser.add_argument("--iterations", type=positive, default=300, metavar="N", help="faults, ten streams around each (default: 300)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="decides what is done, and when (default: %(default)s)")
    parser.add_argument("--logs", metavar="DIRECTORY", help="keep the logs of all processes there")
    parser.set_defaults(run=run_chaos)


def add_soak(commands: Commands) -> None:
    description = "Constant mixed load on a fleet of fake engines: does memory grow, do descriptors, is anything held at the end?"
    parser = commands.add_parser("soak", help="does anything grow?", description=description)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="decides what is asked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run_soak)


def run_up(options: argparse.Namespace) -> int:
    from backend.peers.environment import read_or_exit
    from deploy import up
    from deploy.model import ModelError
    from deploy.settings import DeploySettings

    asked = up.UpOptions(options.engine, options.instances, options.model, options.host, options.port, options.redis)
    try:
        return up.run(asked, read_or_exit(DeploySettings))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run_gateway(options: argparse.Namespace) -> int:
    from backend.peers.environment import read_or_exit
    from gateway.__main__ import run
    from gateway.settings import GatewaySettings

    given = {
        "host": options.host,
        "port": options.port,
        "redis_url": options.redis,
        "backends": options.backend,
        "workers": options.workers,
    }
    run(read_or_exit(GatewaySettings, **{name: value for name, value in given.items() if value is not None}))
    return 0


def run_backend(options: argparse.Namespace) -> int:
    from backend.__main__ import main as backend_main

    return backend_main(backend_arguments(options))


def backend_arguments(options: argparse.Namespace) -> list[str]:
    """The flags as `python -m backend` takes them."""
    arguments = ["--engine", options.engine, "--host", options.host, "--port", str(options.port)]
    for flag in ("--model", "--redis", "--instance-id", "--advertised-url"):
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            arguments += [flag, value]
    return [*arguments, "--", *options.passed_on] if options.passed_on else arguments


def run_keys(options: argparse.Namespace) -> int:
    from deploy import keys

    return keys.run(options)


def run_launcher(options: argparse.Namespace) -> int:
    from backend.peers.environment import read_or_exit
    from deploy.launch import command
    from deploy.settings import DeploySettings

    names = ("kind", "engine", "model", "host", "port", "backend_host", "namespace", "address", "gpus", "cpus")
    asked = command.LauncherOptions(**{name: getattr(options, name) for name in names}, redis_url=options.redis)
    return command.run(asked, read_or_exit(DeploySettings))


def run_bench(options: argparse.Namespace) -> int:
    status: int = import_module(f"bench.{options.subject}").main(options.arguments)
    return status


def run_chaos(options: argparse.Namespace) -> int:
    from bench.chaos.command import execute

    return execute(options.engine, options.iterations, options.seed, options.logs, as_json=options.json)


def run_soak(options: argparse.Namespace) -> int:
    from bench.soak.command import execute

    return execute(options.minutes, options.seed, as_json=options.json)


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("midstream")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
