"""The launcher of this machine: its backends outlive it, and the next one knows them again."""

from deploy.launch.processes import ProcessLauncher
from deploy.launch.runner import DetachedRunner
from deploy.machine import Machine
from deploy.process import Program
from deploy.settings import DeploySettings
from deploy.up import Model, UpOptions, backend_program
from migration.leg import InstanceId


def local_launcher(engine: str, model: Model, redis_url: str, host: str, settings: DeploySettings) -> ProcessLauncher:
    """With what an earlier one has left running. Backends listen on `host`, and are reached under it."""
    machine = Machine.look(settings.visible_gpus)
    asked = UpOptions(engine=engine)

    def program(place: int, instance: InstanceId, port: int, name: str | None) -> Program:
        chosen = model if name is None or name == model.served_as else Model(name, name)
        return backend_program(place, port, asked, chosen, redis_url, machine, instance=instance, host=host)

    runner = DetachedRunner(settings.logs / "launched", settings.launcher_kill_after_s)
    folder = settings.home.resolve() / "launched"
    launcher = ProcessLauncher(runner, program, host=host, default_model=model.served_as, folder=folder)
    for instance in launcher.adopt_noted():
        print(f"  {instance} runs already", flush=True)
    return launcher
