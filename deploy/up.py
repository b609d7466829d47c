"""`midstream up`: Redis, some engines and the gateway on this machine, in the foreground."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from deploy import redis_server
from deploy.health import can_listen, free_ports, http_probe
from deploy.launch.processes import Placed, ProcessLauncher
from deploy.launch.runner import SupervisedRunner
from deploy.launch.server import serving_here
from deploy.machine import Machine
from deploy.model import NAME, ensure_model
from deploy.process import Child, NotHealthy, ProcessDied, Program, Supervisor, supervise
from deploy.settings import DeploySettings
from migration.leg import InstanceId

BACKEND_RANK = 1
GATEWAY_RANK = 2
CPU_CONTEXT_TOKENS = 8192
CPU_BLOCK_TOKENS = 32
CPU_KV_GIB = 1
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a CPU vLLM puts the worker in a process of its own, and the two then wait for each other by spinning: on a core each that others need.
With one thread an engine there is nothing that the worker's own process would be good for."""
GATEWAY_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `midstream up` was asked for. `model` None means the small default model."""

    engine: str = "vllm"
    instances: int = 2
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine is told to load, and the name under which it is served."""

    source: str
    served_as: str

    @property
    def is_local(self) -> bool:
        """Whether it lies in a directory of this machine, so that nothing has to be asked of a hub."""
        return Path(self.source).is_dir()

    @property
    def context_tokens(self) -> int | None:
        """The model's own context length, where its configuration lies on this machine."""
        try:
            known = json.loads((Path(self.source) / "config.json").read_text()).get("max_position_embeddings")
        except (OSError, ValueError):
            return None
        return known if isinstance(known, int) else None


def choose_model(options: UpOptions, settings: DeploySettings) -> Model:
    """The model asked for, as it was given; by default the small one, prepared first if need be. Raises ModelError."""
    if options.engine == "fake":
        return Model(options.model or "fake", options.model or "fake")
    if options.model is not None:
        return Model(options.model, options.model)
    return Model(str(ensure_model(settings)), NAME)


def backend_program(
    index: int,
    port: int,
    options: UpOptions,
    model: Model,
    redis_url: str,
    machine: Machine,
    *,
    instance: str | None = None,
    host: str = "127.0.0.1",
) -> Program:
    """Engine number `index` (from 0) with its share of the machine. One that is not named is one of the first, without which nothing goes
    on."""
    name = instance or f"i{index + 1}"
    command = [sys.executable, "-m", "backend", "--engine", options.engine, "--model", model.source, "--instance-id", name]
    command += ["--host", host, "--port", str(port), "--advertised-url", f"http://{host}:{port}", "--redis", redis_url]
    environment: dict[str, str] = {}
    if options.engine == "vllm":
        command += ["--", *vllm_arguments(model, machine)]
        environment = {**vllm_environment(index, machine), **({"HF_HUB_OFFLINE": "1"} if model.is_local else {})}
    return Program(f"backend-{instance or index + 1}", tuple(command), BACKEND_RANK, environment, vital=instance is None)


def vllm_arguments(model: Model, machine: Machine) -> list[str]:
    """Arguments for vLLM's own server; on a GPU its defaults are right."""
    arguments = ["--served-model-name", model.served_as, "--scheduling-policy", "priority"]
    if machine.gpus:
        return arguments
    known = model.context_tokens
    context = ["--max-model-len", str(min(CPU_CONTEXT_TOKENS, known)) if known is not None else "auto"]
    return [*arguments, "--enforce-eager", "--distributed-executor-backend", CPU_EXECUTOR, *context, "--block-size", str(CPU_BLOCK_TOKENS)]


def vllm_environment(index: int, machine: Machine) -> dict[str, str]:
    """One GPU an engine, in turn, or one thread of the CPU."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if machine.gpus:
        return {**quiet, "CUDA_VISIBLE_DEVICES": machine.gpus[index % len(machine.gpus)]}
    return {**quiet, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB)}


def gateway_program(options: UpOptions, redis_url: str, environment: Mapping[str, str] | None = None) -> Program:
    """The gateway, on the address asked for."""
    address = ("--host", options.host, "--port", str(options.port), "--redis", redis_url)
    return Program("gateway", (sys.executable, "-m", "deploy.cli", "gateway", *address), GATEWAY_RANK, environment or {})


@asynccontextmanager
async def shared_store(options: UpOptions, settings: DeploySettings, supervisor: Supervisor) -> AsyncIterator[str]:
    """The URL of the Redis asked for, or of one of our own."""
    given = options.redis_url or settings.redis_url
    if given is not None:
        print(f"Using Redis at {without_password(given)}", flush=True)
        yield given
    else:
        async with redis_server.own_redis(supervisor) as url:
            print(f"Redis runs at {url}", flush=True)
            yield url


async def start_backends(
    options: UpOptions, settings: DeploySettings, model: Model, redis_url: str, supervisor: Supervisor
) -> Sequence[Child]:
    """Start all engines at once; return when every one is healthy. Raises NotHealthy."""
    children = []
    machine = Machine.look(settings.visible_gpus)
    place = f" on {machine.describe()}" if options.engine == "vllm" else ""
    print(f"Starting {options.instances} {options.engine} instance(s) of {model.served_as}{place}", flush=True)

    async def ready(child: Child, port: int) -> None:
        took_s = await supervisor.wait_healthy(child, http_probe(f"http://127.0.0.1:{port}/health"), settings.start_timeout_s)
        print(f"  {child.program.name} is ready at http://127.0.0.1:{port} ({took_s:.0f} s)", flush=True)

    async with asyncio.TaskGroup() as group:
        for index, port in enumerate(free_ports("127.0.0.1", options.instances)):
            child = await supervisor.start(backend_program(index, port, options, model, redis_url, machine))
            children.append(child)
            group.create_task(ready(child, port))
    return children


@asynccontextmanager
async def own_launcher(
    options: UpOptions, settings: DeploySettings, model: Model, redis_url: str, supervisor: Supervisor, first: Sequence[Child]
) -> AsyncIterator[Mapping[str, str]]:
    """A launcher for this machine, which knows the engines that run already; yields what a gateway's environment says of it."""
    machine = Machine.look(settings.visible_gpus)

    def program(place: int, instance: InstanceId, port: int, name: str | None) -> Program:
        chosen = model if name is None or name == model.served_as else Model(name, name)
        return backend_program(place, port, options, chosen, redis_url, machine, instance=instance)

    runner = SupervisedRunner(supervisor, settings.launcher_kill_after_s)
    launcher = ProcessLauncher(runner, program, host="127.0.0.1", default_model=model.served_as)
    for place, child in enumerate(first):
        launcher.adopt(Placed(InstanceId(f"i{place + 1}"), model.served_as, place, place + 1, runner.know(child)))
    async with serving_here(launcher) as environment:
        yield environment


async def serve(options: UpOptions, settings: DeploySettings, model: Model) -> None:
    """Everything, until cancelled. Raises ExceptionGroup of ProcessDied or NotHealthy."""
    started = time.monotonic()
    logs = settings.logs / str(options.port)  # one folder for each of several that run at once
    async with supervise(logs, settings.stop_timeout_s) as supervisor, shared_store(options, settings, supervisor) as redis_url:
        first = await start_backends(options, settings, model, redis_url, supervisor)
        async with own_launcher(options, settings, model, redis_url, supervisor, first) as environment:
            gateway = await supervisor.start(gateway_program(options, redis_url, environment))
            url = f"http://{reachable(options.host)}:{options.port}"
            await supervisor.wait_healthy(gateway, http_probe(f"{url}/health"), GATEWAY_START_TIMEOUT_S)
            print(welcome(url, model.served_as, time.monotonic() - started, logs), flush=True)
            await asyncio.Event().wait()


def welcome(url: str, model: str, took_s: float, logs: Path) -> str:
    """What to read once everything runs."""
    messages = [{"role": "user", "content": "Explain why the sky is blue."}]
    body = json.dumps({"model": model, "stream": True, "max_tokens": 200, "temperature": 0, "messages": messages})
    return f"""
Midstream is ready after {took_s:.0f} s: {url}/v1   (instances: {url}/admin/instances, logs: {logs})

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{body}'

Ctrl-C stops everything."""


def reachable(host: str) -> str:
    """An address at which a server that listens on `host` can be reached from here."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def without_password(url: str) -> str:
    """A URL fit for being shown."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url


async def until_signalled(options: UpOptions, settings: DeploySettings, model: Model) -> None:
    """Serve; SIGINT and SIGTERM cancel, which stops all children in order. A second signal does not wait for them."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        print("\nStopping.", flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await serve(options, settings, model)


def run(options: UpOptions, settings: DeploySettings) -> int:
    """The exit status: 0 after a signal, 1 if something failed (and was reported). Raises ModelError."""
    if settings.tls_certificate is not None:
        print(
            "error: `midstream up` knows no TLS (MIDSTREAM_TLS_CERTIFICATE is set); start gateways and backends by themselves",
            file=sys.stderr,
        )
        return 1
    if not can_listen(options.host, options.port):
        print(f"error: port {options.port} of {options.host} is taken; choose another with --port", file=sys.stderr)
        return 1
    model = choose_model(options, settings)
    status = 0
    try:
        asyncio.run(until_signalled(options, settings, model))
    except* asyncio.CancelledError:
        print("Everything is stopped.", flush=True)
    except* (ProcessDied, NotHealthy, redis_server.RedisMissing) as failures:
        for failure in leaves(failures):
            print(f"error: {failure}", file=sys.stderr, flush=True)
        status = 1
    return status


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The exceptions of a group, flat."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.extend(leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return flat
