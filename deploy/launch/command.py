"""`midstream launcher`: serves a launcher of one kind until it is told to stop."""

import asyncio
import ipaddress
import signal
import socket
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from deploy.launch.local import local_launcher
from deploy.launch.server import serving
from deploy.launch.service import Starter
from deploy.model import ModelError
from deploy.settings import DeploySettings
from deploy.up import Model, UpOptions, choose_model
from gateway.scaling.launcher import LauncherError


@dataclass(frozen=True, slots=True)
class LauncherOptions:
    """What was asked for. Engine, model and Redis are not for `kubernetes`, `namespace` is not for `process`, `backend_host` only for that;
    `address` (of the cluster), `gpus` and `cpus` (of one backend) are for `ray`."""

    kind: str
    engine: str
    model: str | None
    host: str
    port: int
    backend_host: str
    redis_url: str | None
    namespace: str
    address: str
    gpus: float
    cpus: float


async def serve(starter: Starter, options: LauncherOptions, token: str | None) -> None:
    """Until SIGINT or SIGTERM."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with closing(socket.create_server((options.host, options.port), family=family)) as listener:
        async with serving(starter, token, listener):
            print(f"The launcher is ready: http://{options.host}:{listener.getsockname()[1]}", flush=True)
            await stopping.wait()


def run(options: LauncherOptions, settings: DeploySettings) -> int:
    """The exit status."""
    token = settings.launcher_token.get_secret_value() if settings.launcher_token else None
    if not token and not is_loopback(options.host):
        print("error: set MIDSTREAM_LAUNCHER_TOKEN to listen on an address that others can reach", file=sys.stderr)
        return 1
    try:
        starter = open_starter(options, settings)
    except (LauncherError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    asyncio.run(serve(starter, options, token))
    return 0


def open_starter(options: LauncherOptions, settings: DeploySettings) -> Starter:
    """The launcher of the kind that was asked for. Raises LauncherError, ModelError."""
    if options.kind == "kubernetes":
        try:
            from deploy.launch.kubernetes import open_launcher
        except ImportError as error:
            raise LauncherError(f"the extra `kubernetes` is needed: {error}") from error
        return open_launcher(options.namespace, settings.launcher_timeout_s, lambda: datetime.now(UTC))
    redis_url = options.redis_url or settings.redis_url
    if redis_url is None:
        raise LauncherError("backends need a shared Redis: --redis URL, or MIDSTREAM_REDIS_URL")
    model = choose_model(UpOptions(engine=options.engine, model=options.model), settings)
    if options.kind == "ray":
        return open_ray(options, settings, model, redis_url)
    return local_launcher(options.engine, model, redis_url, options.backend_host, settings)


def open_ray(options: LauncherOptions, settings: DeploySettings, model: Model, redis_url: str) -> Starter:
    """Raises LauncherError."""
    try:
        from deploy.launch.ray import BackendSpec, open_launcher
    except ImportError as error:
        raise LauncherError(f"the extra `ray` is needed: {error}") from error
    resources = {"num_gpus": options.gpus, "num_cpus": options.cpus}
    spec = BackendSpec(options.engine, model, redis_url, resources, settings.launcher_kill_after_s)
    return open_launcher(options.address, options.namespace, spec)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
