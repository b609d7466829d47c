"""`midstream launcher`: starts backends on this machine when gateways ask. They outlive it, and the next launcher knows them again."""

import asyncio
import ipaddress
import signal
import socket
import sys
from contextlib import closing
from dataclasses import dataclass

from deploy.launch.processes import ProcessLauncher
from deploy.launch.runner import DetachedRunner
from deploy.launch.server import serving
from deploy.launch.service import Starter
from deploy.machine import Machine
from deploy.process import Program
from deploy.settings import DeploySettings
from deploy.up import Model, UpOptions, backend_program, choose_model
from migration.leg import InstanceId


@dataclass(frozen=True, slots=True)
class LauncherOptions:
    """What `midstream launcher` was asked for. `backend_host` is where backends listen, and under which they are reached."""

    engine: str
    model: str | None
    host: str
    port: int
    backend_host: str
    redis_url: str


def process_launcher(options: LauncherOptions, settings: DeploySettings, model: Model) -> ProcessLauncher:
    """The launcher of this machine, with what an earlier one has left running."""
    machine = Machine.look(settings.visible_gpus)
    asked = UpOptions(engine=options.engine)

    def program(place: int, instance: InstanceId, port: int, name: str | None) -> Program:
        chosen = model if name is None or name == model.served_as else Model(name, name)
        return backend_program(place, port, asked, chosen, options.redis_url, machine, instance=instance, host=options.backend_host)

    runner = DetachedRunner(settings.logs / "launched", settings.launcher_kill_after_s)
    folder = settings.home.resolve() / "launched"
    launcher = ProcessLauncher(runner, program, host=options.backend_host, default_model=model.served_as, folder=folder)
    for instance in launcher.adopt_noted():
        print(f"  {instance} runs already", flush=True)
    return launcher


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
    """The exit status. Raises ModelError."""
    token = settings.launcher_token.get_secret_value() if settings.launcher_token else None
    if not token and not is_loopback(options.host):
        print("error: set MIDSTREAM_LAUNCHER_TOKEN to listen on an address that others can reach", file=sys.stderr)
        return 1
    model = choose_model(UpOptions(engine=options.engine, model=options.model), settings)
    asyncio.run(serve(process_launcher(options, settings, model), options, token))
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
