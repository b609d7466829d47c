"""The port to whatever runs backends: processes, pods. Several implementations, with one test suite."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from migration.leg import InstanceId


class LaunchState(StrEnum):
    """What the launcher knows of a process; whether it serves is for its reports to say."""

    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"
    """It ended though nobody asked it to; known until it is told to stop."""


@dataclass(frozen=True, slots=True)
class Launched:
    """One backend of a launcher's. `order` rises from launch to launch; `stoppable`: it may be the next to go."""

    instance: InstanceId
    model: str
    order: int
    age_s: float
    state: LaunchState = LaunchState.RUNNING
    stoppable: bool = True
    detail: str = ""


class LauncherError(Exception):
    """The launcher cannot be reached, or did not do it."""


class Launcher(Protocol):
    """Every method may be repeated. `fence` is the token of the lease under which an order is given: one that is smaller than one seen
    before comes from somebody who has been replaced, and is refused."""

    async def launch(self, key: InstanceId, model: str | None, fence: int) -> InstanceId:
        """Start a backend, or answer the one that was started for that key. The answer is its instance id, which is `key` where the
        launcher may choose names. `model` None: its default. Raises LauncherError."""

    async def stop(self, instance: InstanceId, fence: int) -> None:
        """Tell it to stop, by SIGTERM, and return without waiting; forget one that has exited. Nothing if it is not known.
        Raises LauncherError."""

    async def list(self) -> Sequence[Launched]:
        """All that have not been stopped and gone, by `order`. Raises LauncherError."""
