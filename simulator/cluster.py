"""A cluster in virtual time: arrivals, the line, instances; every decision made by the product's policies."""

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random

from backend.engine.request import EngineRequest, RequestState
from backend.registry.instance import InstanceState
from gateway.policy.line import LineView, Waiting
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, RequestView
from migration.leg import InstanceId, RequestId
from migration.protocol import SourceEvent
from simulator.autoscaler import Autoscaler
from simulator.fragmentation import fragmentation
from simulator.instance import Instance
from simulator.job import Job
from simulator.loop import Loop
from simulator.rebalancer import Rebalancer
from simulator.scenario import Scenario, ScenarioError
from simulator.transfer import TransferCost
from simulator.workload import Arrival

_SAMPLE_INTERVAL_S = 1.0
_FIRST_GUESS_TOKENS = 256.0
_GUESS_WEIGHT = 0.01
"""Of one answer, in the running mean of their lengths."""

_order = attrgetter("rank", "waiting.arrived_s", "id")


class Cluster:
    """One simulation. `run` once; then read `jobs`, `rebalancer`, `fragmentations` and `instances_mean`."""

    def __init__(self, scenario: Scenario, arrivals: Sequence[Arrival]) -> None:
        self.policy = scenario.policy.build(Tiers())
        self.loop = Loop()
        self.instances: dict[InstanceId, Instance] = {}
        self.line: list[Job] = []
        self.jobs: list[Job] = []
        self.fragmentations: list[float] = []
        self._shape = scenario.shape()
        self._slowdown = scenario.cost.migration_slowdown
        cost = TransferCost(scenario.cost.kv_bytes_per_token, scenario.cost.migration_bytes_per_s, scenario.cost.migration_downtime_s)
        self.rebalancer = Rebalancer(self, self.policy, self.loop, cost)
        self.autoscaler = Autoscaler(self, scenario.autoscale, self.loop)
        self._rng = Random(f"{scenario.workload.seed}-policy")
        self._ahead = 0
        self._finished = 0
        self._expected_output_tokens = _FIRST_GUESS_TOKENS
        self._binding = False
        self._started = 0
        for _ in range(scenario.cluster.instances):
            self.add_instance(InstanceState.READY)
        self._plan(arrivals)

    # -- what others ask for

    def view(self) -> ClusterView:
        """As it is now."""
        return ClusterView(tuple(instance.view() for instance in self.instances.values()))

    def add_instance(self, state: InstanceState) -> Instance:
        """One more."""
        instance = Instance(f"i{self._started:03}", self._shape, self.loop, self, self._slowdown)
        instance.state = state
        self._started += 1
        self.instances[instance.id] = instance
        return instance

    def run(self) -> None:
        """Until every job is finished."""
        self._every(self.policy.rebalancing.interval_s, self._tick)
        if self.policy.rebalancing.release is not None:
            self._every(self.policy.rebalancing.release.interval_s, self.rebalancer.release)
        self._every(_SAMPLE_INTERVAL_S, self._sample)
        if self.autoscaler.interval_s is not None:
            self._every(self.autoscaler.interval_s, self.autoscaler.tick)
        self.loop.run(lambda: self._finished == len(self.jobs))
        self.autoscaler.count()

    @property
    def instances_mean(self) -> float:
        """How many instances there were, in the mean."""
        return self.autoscaler.used_s / self.loop.now_s if self.loop.now_s else float(len(self.instances))

    def changed(self) -> None:
        """Memory may have been freed: bind whom that gives room."""
        if not self.line or self._binding:
            return
        self._binding = True
        while self.line:
            waiting = tuple(job.waiting for job in self.line)
            view = LineView(waiting, self.loop.now_s, self._ahead, self._expected_output_tokens)
            bindings = self.policy.line.bind(view, self.view(), self._rng)
            if not bindings:
                break
            jobs = {job.id: job for job in self.line}
            bound = {binding.request for binding in bindings}
            self.line = [job for job in self.line if job.id not in bound]
            for binding in bindings:
                self._bind(jobs[binding.request], self.instances[binding.instance], binding.ahead)
        self._binding = False

    def withdraw(self, job: Job, source: Instance, since_s: float) -> None:
        """A waiting job leaves its instance's queue for the line, as one that came then."""
        source.count(job, -1)
        source.remove(job)
        if job.is_ahead:
            job.is_ahead = False
            self._ahead -= 1
        old = _begin_anew(job)
        job.waiting = Waiting(job.waiting.view, old.prompt_tokens + old.output_tokens, since_s, old.output_tokens > 0, job.rank)
        job.place = None
        insort(self.line, job, key=_order)
        self.changed()

    def release(self, job: Job, source: Instance) -> None:
        """A preempted job leaves its instance's queue for the end of the line."""
        self.withdraw(job, source, self.loop.now_s)

    def requeue(self, job: Job, source: Instance, destination: Instance) -> None:
        """A waiting job goes from one queue to the other."""
        source.count(job, -1)
        source.remove(job)
        _begin_anew(job)
        job.place, job.came_with_tokens = destination.id, job.engine_request.output_tokens
        destination.count(job, 1)
        destination.add(job)
        self.changed()

    # -- Watcher

    def started(self, instance: Instance, job: Job) -> None:
        if job.is_ahead:
            job.is_ahead = False
            self._ahead -= 1
            self.loop.after(0.0, self.changed)

    def preempted(self, instance: Instance, job: Job) -> None:
        job.preemptions += 1
        if job.lost_since_s is None:
            job.lost_since_s = self.loop.now_s
        self.rebalancer.left(job, SourceEvent.FAILED)

    def finished(self, instance: Instance, job: Job) -> None:
        job.finish_s = self.loop.now_s
        self._finished += 1
        self._expected_output_tokens += _GUESS_WEIGHT * (job.arrival.output_tokens - self._expected_output_tokens)
        instance.count(job, -1)
        self.rebalancer.left(job, SourceEvent.ENDED)
        self.changed()

    def redispatch(self, instance: Instance, job: Job) -> None:
        """A waiting job leaves its instance for the line."""
        if job.engine_request.state is not RequestState.WAITING or job.place != instance.id:
            return
        self.withdraw(job, instance, job.waiting.arrived_s)

    # -- inside

    def _plan(self, arrivals: Sequence[Arrival]) -> None:
        capacity = self._shape.capacity_blocks * self._shape.block_tokens
        for number, arrival in enumerate(arrivals):
            if arrival.prompt_tokens + arrival.output_tokens > capacity:
                raise ScenarioError(f"request {number} needs {arrival.prompt_tokens} + {arrival.output_tokens} tokens of {capacity}")
            if not self.policy.tiers.knows(arrival.tier):
                raise ScenarioError(f"request {number} is of the unknown tier '{arrival.tier}'")
            tier = self.policy.tiers.find(arrival.tier)
            rank = tier.rank if self.policy.ranked else 0
            name = RequestId(f"r{number:07}")
            view = RequestView(name, None, arrival.tier, arrival.prompt_tokens, sequence=number)
            job = Job(
                name,
                arrival,
                rank,
                Waiting(view, arrival.prompt_tokens, arrival.arrival_s, rank=rank),
                EngineRequest(arrival.prompt_tokens, arrival.output_tokens, rank, arrival.tier),
            )
            self.jobs.append(job)
            self.loop.at(arrival.arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]

    def _arrive(self, job: Job) -> None:
        insort(self.line, job, key=_order)
        self.changed()

    def _bind(self, job: Job, instance: Instance, ahead: bool) -> None:
        job.place, job.came_with_tokens = instance.id, job.engine_request.output_tokens
        job.is_ahead = ahead
        self._ahead += ahead
        instance.count(job, 1)
        instance.add(job)

    def _every(self, interval_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self.loop.after(interval_s, act)

        self.loop.after(interval_s, act)

    def _tick(self) -> None:
        self.rebalancer.tick()
        self.changed()

    def _sample(self) -> None:
        """Only while requests still come."""
        if self.loop.now_s <= self.jobs[-1].arrival.arrival_s:
            self.fragmentations.append(fragmentation(self.view(), [job.waiting.tokens for job in self.line[: len(self.instances)]]))


def _begin_anew(job: Job) -> EngineRequest:
    """It holds nothing any more; answers what it was to its last engine."""
    old = job.engine_request
    job.engine_request = EngineRequest(old.prompt_tokens, old.max_output_tokens, old.priority, old.tier, output_tokens=old.output_tokens)
    job.engine_request.preemptions = old.preemptions
    return old
