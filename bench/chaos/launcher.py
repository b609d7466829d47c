"""Starts and stops the backends of a chaos fleet as its gateways' operations order it; behind `deploy/launch/service.py`."""

from collections.abc import Mapping, Sequence

from bench.chaos.process import Process
from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from migration.leg import InstanceId


class FleetLauncher:
    """Implements the service's Starter over a fixed set of backends: a launch starts one that is gone again, under its own name."""

    def __init__(self, model: str, processes: Mapping[str, Process]) -> None:
        self._model = model
        self._processes = processes
        self._launched: dict[InstanceId, InstanceId] = {}
        """Which backend was started for which key: an order may come twice."""
        self._stopping: set[InstanceId] = set()

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId:
        """Raises LauncherError if all of them run."""
        if key not in self._launched:
            gone = [name for name, process in self._processes.items() if not process.alive]
            if not gone:
                raise LauncherError("every backend of the fleet runs")
            self._launched[key] = instance = InstanceId(gone[0])
            self._stopping.discard(instance)
            await self._processes[instance].spawn()
        return self._launched[key]

    async def stop(self, instance: InstanceId) -> None:
        """SIGTERM, without waiting; nothing if it is not there."""
        process = self._processes.get(instance)
        if process is not None and process.alive and instance not in self._stopping:
            self._stopping.add(instance)
            process.terminate()

    async def list(self) -> Sequence[Launched]:
        """Those that run."""
        return [
            Launched(InstanceId(name), self._model, order, 0.0, LaunchState.STOPPING if name in self._stopping else LaunchState.RUNNING)
            for order, (name, process) in enumerate(self._processes.items(), 1)
            if process.alive
        ]
