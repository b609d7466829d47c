"""The Ray launcher, and the only importer of Ray: each backend is a process beside an actor, which Ray places where its resources are free.

The actor starts the process on its node and ends with it: a node that dies takes both, and an actor that dies takes the process along by
SIGTERM. Actors are detached and named after what they run, so they outlive the launcher, and the next one finds them by their names,
those too that still wait for resources.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from deploy.health import free_ports
from deploy.machine import Machine
from deploy.process import describe_exit, die_with_parent, tail
from deploy.settings import DeploySettings, child_environment
from deploy.up import Model, UpOptions, backend_program
from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from migration.leg import InstanceId

T = TypeVar("T")

PREFIX = "midstream"
SEPARATOR = "|"
ANSWER_WITHIN_S = 1.0
"""Of an actor that runs; one that does not answer by then waits for resources, or is just being started."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What every backend of a launcher has in common. `resources` are Ray's: `num_gpus`, `num_cpus`, `memory`, or names of one's own."""

    engine: str
    model: Model
    redis_url: str
    resources: Mapping[str, float]
    kill_after_s: float


@dataclass(frozen=True, slots=True)
class _Named:
    """An actor's name, and what it says."""

    instance: InstanceId
    order: int
    model: str

    @property
    def text(self) -> str:
        return SEPARATOR.join((PREFIX, self.instance, str(self.order), self.model))

    @staticmethod
    def read(text: str) -> "_Named | None":
        match text.split(SEPARATOR, 3):
            case [prefix, instance, order, model] if prefix == PREFIX and order.isdecimal():
                return _Named(InstanceId(instance), int(order), model)
        return None


class BackendActor:
    """Runs in a Ray worker; owns one backend's process."""

    def __init__(self, spec: BackendSpec, instance: str, order: int, model: Model) -> None:
        settings = DeploySettings()
        host = str(ray.util.get_node_ip_address())
        [port] = free_ports(host, 1)
        options, machine = UpOptions(engine=spec.engine), Machine.look(settings.visible_gpus)
        program = backend_program(order, port, options, model, spec.redis_url, machine, instance=instance, host=host)
        logs = settings.logs / "launched"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{program.name}.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(program.environment),
                process_group=0,
                preexec_fn=die_with_parent(),  # this worker runs no other thread of ours
            )
        self._kill_after_s = spec.kill_after_s
        self._started_s = time.monotonic()
        self._told_s: float | None = None

    def look(self) -> tuple[float, bool, str | None]:
        """Its age in seconds, whether it was told to stop, and how it ended, if it did."""
        code = self._process.poll()
        how = None if code is None else f"{describe_exit(code)}\n{tail(self._log)}"
        return time.monotonic() - self._started_s, self._told_s is not None, how

    def tell_to_stop(self) -> bool:
        """SIGTERM, the first time; SIGKILL, for its group, once it has had its time. True if it has ended."""
        if self._process.poll() is None:
            if self._told_s is None:
                self._told_s = time.monotonic()
                self._process.send_signal(signal.SIGTERM)
            elif time.monotonic() - self._told_s > self._kill_after_s:
                self._kill_group()
            return False
        self._kill_group()  # what it started and left behind
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class RayLauncher:
    """Implements Launcher, but for the fence. Ray is connected to `namespace` by now."""

    def __init__(self, spec: BackendSpec, namespace: str) -> None:
        self._spec = spec
        self._namespace = namespace

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId:
        await self._in_thread(lambda: self._launch(key, model))
        return key

    async def stop(self, instance: InstanceId) -> None:
        await self._in_thread(lambda: self._stop(instance))

    async def list(self) -> Sequence[Launched]:
        return await self._in_thread(self._list)

    def _launch(self, key: InstanceId, name: str | None) -> None:
        known = self._known()
        if key in {each.instance for each in known}:
            return
        default = self._spec.model
        model = default if name is None or name == default.served_as else Model(name, name)
        named = _Named(key, max((each.order for each in known), default=0) + 1, model.served_as)
        own = {name: amount for name, amount in self._spec.resources.items() if name not in ("num_gpus", "num_cpus", "memory")}
        usual = {name: amount for name, amount in self._spec.resources.items() if name not in own}
        options = {"name": named.text, "namespace": self._namespace, "lifetime": "detached", "max_restarts": 0, "resources": own, **usual}
        ray.remote(BackendActor).options(**options).remote(self._spec, key, named.order, model)

    def _stop(self, instance: InstanceId) -> None:
        for named in self._known():
            if named.instance == instance:
                actor = self._actor(named)
                if actor is not None and self._ask(actor.tell_to_stop, True):
                    ray.kill(actor)  # also one that waits for resources

    def _list(self) -> Sequence[Launched]:
        actors = [(named, self._actor(named)) for named in self._known()]
        asked = [(named, actor, actor.look.remote()) for named, actor in actors if actor is not None]
        answered = set(ray.wait([each[2] for each in asked], num_returns=len(asked), timeout=ANSWER_WITHIN_S)[0]) if asked else set()
        launched = []
        for named, actor, reference in asked:
            state, age_s, detail = LaunchState.RUNNING, 0.0, "waits for resources"
            if reference in answered:
                try:
                    age_s, told, how = ray.get(reference)
                except RayActorError as error:
                    told, how = False, f"its actor is gone: {error}"
                if told and how is not None:
                    ray.kill(actor)
                    continue
                state = LaunchState.EXITED if how is not None else LaunchState.STOPPING if told else LaunchState.RUNNING
                detail = how or ""
            launched.append(Launched(named.instance, named.model, named.order, age_s, state, True, detail))
        return launched

    def _known(self) -> Sequence[_Named]:
        names = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == self._namespace)
        return sorted((named for name in names if (named := _Named.read(name)) is not None), key=lambda each: each.order)

    def _actor(self, named: _Named) -> Any:
        """None if it is gone since it was listed."""
        try:
            return ray.get_actor(named.text, namespace=self._namespace)
        except ValueError:
            return None

    @staticmethod
    def _ask(method: Any, otherwise: T) -> T:
        """What it answers in time; `otherwise` if it does not, or is dead."""
        try:
            answer: T = ray.get(method.remote(), timeout=ANSWER_WITHIN_S)
        except (GetTimeoutError, RayActorError):
            return otherwise
        return answer

    @staticmethod
    async def _in_thread(call: Callable[[], T]) -> T:
        """Ray's client waits in a thread. Raises LauncherError."""
        try:
            return await asyncio.to_thread(call)
        except (RayError, ConnectionError, ValueError) as error:
            raise LauncherError(f"Ray did not do it: {error}") from error


def open_launcher(address: str, namespace: str, spec: BackendSpec) -> RayLauncher:
    """Connect to a cluster (`auto`: the one of this machine). Raises LauncherError."""
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (RayError, ConnectionError, ValueError) as error:
        raise LauncherError(f"no Ray cluster at {address}: {error}") from error
    return RayLauncher(spec, namespace)
