"""One look at one instance of an operation: does what its phase asks for, and tells what came of it.

Everything here may be done twice: a gateway that takes the lease over repeats what its predecessor may or may not have done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.errors import UpstreamFailed
from gateway.policy.view import ClusterView, ViewState
from gateway.scaling.launcher import Launched, Launcher, LauncherError, LaunchState
from gateway.scaling.llumlets import Llumlets
from gateway.scaling.operation import Operation, OperationEvent, Phase, RequestOutcome, Subject
from migration.leg import InstanceId


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a look. `event` None: nothing new. `named`: what the launcher calls a launched instance."""

    event: OperationEvent | None = None
    note: str = ""
    requests: Sequence[RequestOutcome] = ()
    named: InstanceId | None = None


NOTHING = Finding()


@dataclass(frozen=True, slots=True)
class Scene:
    """What the looks of one round share. `launched` None: the launcher does not tell at the moment."""

    cluster: ClusterView
    launched: Mapping[InstanceId, Launched] | None
    fence: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, but for `attempts`: how long a start and a drain may take, and how often a launcher is asked."""

    start_s: float
    drain_s: float
    retry_s: float
    max_retry_s: float
    attempts: int

    def pause_s(self, attempts: int) -> float:
        """How long to wait after so many failures: doubled with each."""
        return min(self.max_retry_s, self.retry_s * 2.0 ** (attempts - 1)) if attempts else 0.0


class Hand:
    """Remembers, in this gateway alone, when it first met a subject in its phase: back-off and the deadline of an instance that does not
    answer are counted from there, by one clock (monotonic, in seconds)."""

    def __init__(self, launcher: Launcher, llumlets: Llumlets, limits: Limits, clock: Callable[[], float]) -> None:
        self._launcher = launcher
        self._llumlets = llumlets
        self._limits = limits
        self._clock = clock
        self._met: dict[tuple[str, InstanceId], tuple[Subject, float]] = {}

    async def look(self, operation: Operation, subject: Subject, scene: Scene) -> Finding:
        """Do what is to be done for it now."""
        since_s = self._since_s(operation.id, subject)
        try:
            match subject.phase:
                case Phase.PENDING if operation.kind == "scale_out":
                    return await self._launch(operation, subject, scene, since_s)
                case Phase.STARTING:
                    return self._await_ready(subject, scene)
                case Phase.CLEARING | Phase.WITHDRAWING | Phase.STOPPING:
                    return await self._stop(subject, scene, since_s)
                case Phase.PENDING | Phase.DRAINING:
                    return await self._drain(subject, scene, since_s)
                case Phase.RETURNING:
                    return await self._return(subject, scene, since_s)
        except LauncherError as error:
            return Finding(OperationEvent.REFUSED, str(error))
        return NOTHING

    def forget(self, operation: str) -> None:
        """It is over."""
        self._met = {key: known for key, known in self._met.items() if key[0] != operation}

    def _since_s(self, operation: str, subject: Subject) -> float:
        """How long the subject has been as it is."""
        key, now_s = (operation, subject.instance), self._clock()
        known = self._met.get(key)
        if known is None or known[0] != subject:
            self._met[key] = known = (subject, now_s)
        return now_s - known[1]

    async def _launch(self, operation: Operation, subject: Subject, scene: Scene, since_s: float) -> Finding:
        if subject.attempts >= self._limits.attempts:
            return Finding(OperationEvent.GAVE_UP, f"after {subject.attempts} attempts")
        if since_s < self._limits.pause_s(subject.attempts):
            return NOTHING
        named = await self._launcher.launch(subject.instance, operation.model, scene.fence)
        return Finding(OperationEvent.LAUNCHED, named=named)

    def _await_ready(self, subject: Subject, scene: Scene) -> Finding:
        view = scene.cluster.find(subject.instance)
        if view is not None and view.state is ViewState.READY:
            return Finding(OperationEvent.READY)
        if scene.launched is None:
            return NOTHING
        launched = scene.launched.get(subject.instance)
        if launched is None or launched.state is LaunchState.EXITED:
            return Finding(OperationEvent.FAILED, launched.detail if launched else "its process is gone")
        if launched.age_s > self._limits.start_s:
            return Finding(OperationEvent.FAILED, f"not ready after {self._limits.start_s:g} s")
        return NOTHING

    async def _stop(self, subject: Subject, scene: Scene, since_s: float) -> Finding:
        if subject.phase is Phase.STOPPING and subject.attempts >= self._limits.attempts:
            return Finding(OperationEvent.GAVE_UP, f"after {subject.attempts} attempts")
        if since_s < self._limits.pause_s(subject.attempts):
            return NOTHING
        if scene.launched is not None and subject.instance not in scene.launched:
            return Finding(OperationEvent.GONE)
        await self._launcher.stop(subject.instance, scene.fence)
        return NOTHING

    async def _drain(self, subject: Subject, scene: Scene, since_s: float) -> Finding:
        view = scene.cluster.find(subject.instance)
        if view is None:
            is_gone = scene.launched is not None and subject.instance not in scene.launched
            return _overdue("it does not report any more") if is_gone or since_s > self._limits.drain_s else NOTHING
        try:
            status = await self._llumlets.drain(view)
        except UpstreamFailed as error:
            return _overdue(error.message) if since_s > self._limits.drain_s else NOTHING
        event, note = None, ""
        if subject.phase is Phase.PENDING:
            event = OperationEvent.DRAIN_ORDERED
        elif not status.remaining:
            event, note = OperationEvent.DRAINED, f"in {status.elapsed_s:.1f} s"
        elif max(since_s, status.elapsed_s) > self._limits.drain_s and since_s > 0:
            event, note = OperationEvent.OVERDUE, f"{status.remaining} requests after {status.elapsed_s:.0f} s"
        return Finding(event, note, status.requests)

    async def _return(self, subject: Subject, scene: Scene, since_s: float) -> Finding:
        view = scene.cluster.find(subject.instance)
        if view is None:
            return Finding(OperationEvent.RETURNED, "it does not report any more")
        try:
            status = await self._llumlets.undrain(view)
        except UpstreamFailed as error:
            return Finding(OperationEvent.RETURNED, error.message) if since_s > self._limits.drain_s else NOTHING
        return Finding(OperationEvent.RETURNED, "" if status else "it is about to stop all the same")


def _overdue(note: str) -> Finding:
    return Finding(OperationEvent.OVERDUE, note)
