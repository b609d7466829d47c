"""One modelled instance in virtual time: its engine's steps, and the load report that policies see of it."""

from collections.abc import Callable
from typing import Protocol

from backend.engine.model import EngineModel
from backend.engine.request import EngineRequest, RequestState
from backend.engine.shape import EngineShape
from backend.registry.instance import InstanceState
from backend.registry.store import Sighting
from gateway.policy.view import InstanceView, assemble
from migration.leg import InstanceId
from simulator.job import Job
from simulator.loop import Loop

_STALE_S = 1e9


class Watcher(Protocol):
    """Whoever wants to know what becomes of the jobs."""

    def started(self, instance: "Instance", job: Job) -> None:
        """It is in the batch."""

    def preempted(self, instance: "Instance", job: Job) -> None:
        """It has lost its memory and waits again."""

    def finished(self, instance: "Instance", job: Job) -> None:
        """It has all its tokens."""


class Instance:
    """`claims` and `claimed_tokens` are the store's count of requests that were sent here."""

    def __init__(self, name: str, shape: EngineShape, loop: Loop, watcher: Watcher, slowdown: float) -> None:
        self.id = InstanceId(name)
        self.model = EngineModel(shape)
        self.state = InstanceState.READY
        self.jobs: dict[EngineRequest, Job] = {}
        self.claims = 0
        self.claimed_tokens = 0
        self.moves_in = 0
        self.moves_out = 0
        self._loop = loop
        self._watcher = watcher
        self._slowdown = slowdown
        self._view: InstanceView | None = None
        self._boundary: list[Callable[[], None]] = []
        self._sequence = 0

    # -- what policies see

    def view(self) -> InstanceView:
        """Assembled by the product's code from the report as it is published now."""
        if self._view is None:
            self._sequence += 1
            report = self.model.report(
                self._loop.now_s,
                instance=self.id,
                sequence=self._sequence,
                state=self.state,
                migrations_in=self.moves_in,
                migrations_out=self.moves_out,
            )
            sighting = Sighting(report, 0.0, self.claims, self.claimed_tokens)
            self._view = assemble((sighting,), _STALE_S, 0.0, {}).instances[0]
        return self._view

    def changed(self) -> None:
        """The next view is to be a new one."""
        self._view = None

    # -- requests

    def count(self, job: Job, claims: int) -> None:
        """Its claim is here now (1), or is not any more (-1)."""
        self.claims += claims
        self.claimed_tokens += claims * job.waiting.tokens
        self._view = None

    def add(self, job: Job) -> None:
        """Queue it."""
        self.jobs[job.engine_request] = job
        self.model.add(job.engine_request, self._loop.now_s)
        self.kick()

    def remove(self, job: Job) -> None:
        """It goes on elsewhere: free what it holds."""
        self.jobs.pop(job.engine_request, None)
        self.model.end(job.engine_request)
        self.kick()

    def waiting_jobs(self) -> list[Job]:
        """Those in the engine's queue, in its order."""
        return [self.jobs[request] for request in self.model.waiting]

    def at_boundary(self, action: Callable[[], None]) -> None:
        """Do this between two steps, now if none is running."""
        if self.model.in_step:
            self._boundary.append(action)
        else:
            action()

    # -- steps

    def kick(self) -> None:
        """Begin a step if none is running and something can run."""
        self._view = None
        model = self.model
        if model.in_step:
            return
        step = model.begin_step(self._loop.now_s)
        if step is None:
            return
        duration_s = step.duration_s
        if self.moves_in or self.moves_out:
            duration_s *= 1 + self._slowdown
        self._loop.after(duration_s, self._end_step)
        for request in step.admitted:
            self._watcher.started(self, self.jobs[request])
        for request in step.preempted:
            self._watcher.preempted(self, self.jobs[request])

    def _end_step(self) -> None:
        now_s = self._loop.now_s
        finished, ended = [], RequestState.ENDED
        for request in self.model.end_step():
            if request.state is ended:
                job = self.jobs.pop(request)
                finished.append(job)
            elif request.output_tokens == 1 or request.preemptions:
                job = self.jobs[request]
            else:
                continue
            if job.first_token_s is None:
                job.first_token_s = now_s
            if job.lost_since_s is not None:
                job.lost_s += now_s - job.lost_since_s
                job.lost_since_s = None
        actions, self._boundary = self._boundary, []
        for action in actions:
            action()
        self._view = None
        for job in finished:
            self._watcher.finished(self, job)
        self.kick()
