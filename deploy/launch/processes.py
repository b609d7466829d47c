"""The process launcher: backends as processes of this machine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.health import free_ports
from deploy.launch.runner import Process, Runner
from deploy.process import Program
from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from migration.leg import InstanceId
from migration.typed_json import decode, encode

MakeProgram = Callable[[int, InstanceId, int, str | None], Program]
"""Of a place (its share of the machine, from 0), an instance, a port and a model (None: the default)."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A backend and its place on this machine."""

    instance: InstanceId
    model: str
    place: int
    order: int
    process: Process
    told_to_stop: bool = False


class ProcessLauncher:
    """Implements Launcher, but for the fence, which is the service's. `folder`: where to note what runs, for the launcher after this one;
    None if nothing outlives this one."""

    def __init__(self, runner: Runner, program: MakeProgram, *, host: str, default_model: str, folder: Path | None = None) -> None:
        self._runner = runner
        self._program = program
        self._host = host
        self._default_model = default_model
        self._folder = folder
        self._known: dict[InstanceId, Placed] = {}

    @property
    def placed(self) -> Sequence[Placed]:
        """All that are known, by order."""
        return sorted(self._known.values(), key=lambda each: each.order)

    def adopt(self, placed: Placed) -> None:
        """One that runs already."""
        self._known[placed.instance] = placed
        self._note(placed)

    def adopt_noted(self) -> Sequence[InstanceId]:
        """Those that an earlier launcher has noted, and that still run."""
        assert self._folder is not None
        for file in sorted(self._folder.glob("*.json")):
            try:
                placed = decode(Placed, json.loads(file.read_text()))
            except ValueError:
                continue  # not ours
            if placed.process.runs:
                self._known[placed.instance] = placed
            else:
                file.unlink()
        return tuple(self._known)

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId:
        """Raises LauncherError."""
        if key not in self._known:
            taken = {each.place for each in self._known.values() if self._runner.how_it_ended(each.process) is None}
            place = next(place for place in range(len(taken) + 1) if place not in taken)
            [port] = free_ports(self._host, 1)
            try:
                process = await self._runner.start(self._program(place, key, port, model))
            except OSError as error:
                raise LauncherError(f"{key} could not be started: {error}") from error
            order = max((each.order for each in self._known.values()), default=0) + 1
            self.adopt(Placed(key, model or self._default_model, place, order, process))
        return key

    async def stop(self, instance: InstanceId) -> None:
        placed = self._known.get(instance)
        if placed is None:
            return
        if self._runner.how_it_ended(placed.process) is not None:
            self._forget(instance)
            return
        self.adopt(replace(placed, told_to_stop=True))
        self._runner.stop(placed.process, told=placed.told_to_stop)

    async def list(self) -> Sequence[Launched]:
        launched = []
        for placed in self.placed:
            how = self._runner.how_it_ended(placed.process)
            if how is not None and placed.told_to_stop:
                self._forget(placed.instance)
                continue
            state = LaunchState.EXITED if how is not None else LaunchState.STOPPING if placed.told_to_stop else LaunchState.RUNNING
            launched.append(Launched(placed.instance, placed.model, placed.order, placed.process.age_s, state, True, how or ""))
        return launched

    def _note(self, placed: Placed) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(encode(placed))
            draft = self._folder / f".{placed.instance}"
            draft.write_text(text)
            draft.rename(self._folder / f"{placed.instance}.json")

    def _forget(self, instance: InstanceId) -> None:
        del self._known[instance]
        if self._folder is not None:
            (self._folder / f"{instance}.json").unlink(missing_ok=True)
