"""Starts and drains instances in virtual time, as the policy's rule says."""

from typing import Protocol

from backend.registry.instance import InstanceState
from gateway.policy.autoscale import Fixed, ScaleDecision, ScaleMemory, ScaleView
from gateway.policy.view import ClusterView
from migration.leg import InstanceId
from simulator.instance import Instance
from simulator.job import Job
from simulator.loop import Loop
from simulator.scenario import AutoscaleConfig


class Stage(Protocol):
    """The cluster, as the auto-scaler needs it."""

    instances: dict[InstanceId, Instance]
    line: list[Job]

    def view(self) -> ClusterView:
        """As it is now."""

    def add_instance(self, state: InstanceState) -> Instance:
        """One more."""

    def redispatch(self, instance: Instance, job: Job) -> None:
        """A waiting job leaves its instance for the line."""

    def changed(self) -> None:
        """There may be room."""


class Autoscaler:
    """`used_s` is the time of all instances together so far; a draining one counts until it is empty."""

    def __init__(self, stage: Stage, config: AutoscaleConfig, loop: Loop) -> None:
        self._stage = stage
        self._config = config
        self._loop = loop
        self._memory = ScaleMemory()
        self._counted_s = 0.0
        self.used_s = 0.0

    @property
    def interval_s(self) -> float | None:
        """How often to tick; None: never."""
        return None if isinstance(self._config.rule, Fixed) else self._config.interval_s

    def count(self) -> None:
        """Add up the time since the last count. Call before the number of instances changes."""
        self.used_s += len(self._stage.instances) * (self._loop.now_s - self._counted_s)
        self._counted_s = self._loop.now_s

    def tick(self) -> None:
        """Retire what is drained; then decide, and carry it out."""
        self.count()
        stage = self._stage
        for instance in tuple(stage.instances.values()):
            is_idle = not instance.jobs and not instance.claims and not instance.moves_in
            if instance.state is InstanceState.DRAINING and is_idle:
                del stage.instances[instance.id]
        waiting_tokens = sum(job.waiting.tokens for job in stage.line)
        decision, self._memory = self._config.rule.decide(ScaleView(stage.view(), self._loop.now_s, waiting_tokens, self._memory))
        self._carry_out(decision)

    def _carry_out(self, decision: ScaleDecision) -> None:
        stage = self._stage
        for name in decision.undrain:
            self._set(stage.instances[name], InstanceState.READY)
        for _ in range(decision.start):
            instance = stage.add_instance(InstanceState.STARTING)
            self._loop.after(self._config.start_up_s, lambda instance=instance: self._ready(instance))  # type: ignore[misc]
        for name in decision.drain:
            instance = stage.instances[name]
            self._set(instance, InstanceState.DRAINING)
            for job in instance.waiting_jobs():
                stage.redispatch(instance, job)
        if decision != ScaleDecision():
            stage.changed()

    def _ready(self, instance: Instance) -> None:
        self._set(instance, InstanceState.READY)
        self._stage.changed()

    @staticmethod
    def _set(instance: Instance, state: InstanceState) -> None:
        instance.state = state
        instance.changed()
