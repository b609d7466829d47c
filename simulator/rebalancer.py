"""Moves running requests in virtual time: the policy's pairs and prices, the source's own choice of the request."""

from typing import Protocol

from backend.engine.request import RequestState
from gateway.policy.config import Policy
from gateway.policy.decision import pair_up, release_from
from gateway.policy.load import standing
from gateway.policy.question import offer_question, pair_question, release_question
from gateway.policy.rebalance import Pair, Reason
from gateway.policy.view import ClusterView
from migration.choice import Movable
from migration.leg import InstanceId, RequestId
from migration.protocol import SourceEvent
from migration.question import choose
from simulator.instance import Instance
from simulator.job import Job
from simulator.loop import Loop
from simulator.transfer import Transfer, TransferCost


class Stage(Protocol):
    """The cluster, as the rebalancer needs it."""

    @property
    def instances(self) -> dict[InstanceId, Instance]:
        """All of them, by id."""

    def view(self) -> ClusterView:
        """As it is now."""

    def changed(self) -> None:
        """Memory may have been freed."""

    def requeue(self, job: Job, source: Instance, destination: Instance) -> None:
        """A waiting job goes from one queue to the other."""

    def release(self, job: Job, source: Instance) -> None:
        """A preempted job leaves its instance's queue for the end of the line."""


class Rebalancer:
    """One migration out and one in per instance, at most."""

    def __init__(self, stage: Stage, policy: Policy, loop: Loop, cost: TransferCost) -> None:
        self.migrations = 0
        self._stage = stage
        self._policy = policy
        self._moves = policy.rebalancing
        self._loop = loop
        self._cost = cost
        self._pairs: dict[InstanceId, Pair] = {}
        self._transfers: dict[InstanceId, Transfer] = {}
        """By source."""

    def tick(self) -> None:
        """One round of pairing, then of prices."""
        self._pairs = {pair.source: pair for pair in pair_up(self._moves, self._stage.view())}
        for pair in tuple(self._pairs.values()):
            self._work_on(pair)
        if self._moves.price is not None:
            self._trade()

    def release(self) -> None:
        """Let go whom the release step lets go."""
        for source in release_from(self._moves, self._stage.view()):
            self._release(self._stage.instances[source])

    def left(self, job: Job, event: SourceEvent) -> None:
        """A job ended or was preempted: its migration, if there is one, comes to nothing."""
        transfer = self._transfers.get(job.place) if job.place is not None else None
        if transfer is not None and transfer.job is job:
            transfer.interrupt(event)

    def _work_on(self, pair: Pair) -> None:
        source, destination = self._stage.instances[pair.source], self._stage.instances[pair.destination]
        if source.moves_out or destination.moves_in:
            return
        tiers = self._policy.tiers
        question = pair_question(
            pair, standing(source.view(), tiers), standing(destination.view(), tiers), tiers, ranked=self._policy.ranked
        )
        if pair.reason is Reason.QUEUE:
            for move in choose(question, self._waiting(source)):
                self._stage.requeue(self._find(move.request, source), source, destination)
            return
        for move in choose(question, self._movable(source)):
            self._start(move.request, source, destination)

    def _release(self, source: Instance) -> None:
        step, tiers = self._moves.release, self._policy.tiers
        assert step is not None
        question = release_question(step, standing(source.view(), tiers), tiers, ranked=self._policy.ranked)
        for move in choose(question, self._waiting(source, ran_here=True)):
            self._stage.release(self._find(move.request, source), source)

    def _trade(self) -> None:
        price = self._moves.price
        assert price is not None
        instances = self._stage.instances
        busy_out = frozenset(name for name, each in instances.items() if each.moves_out)
        busy_in = frozenset(name for name, each in instances.items() if each.moves_in)
        answers = {}
        for offer in price.offers(self._stage.view(), busy_out, busy_in):
            question = offer_question(offer, self._policy.tiers, ranked=self._policy.ranked)
            moves = choose(question, self._movable(instances[offer.source.instance]))
            if moves:
                answers[offer.source.instance] = moves
        for grant in price.grants(answers):
            source = instances[grant.source]
            self._start(grant.move.request, source, instances[grant.move.destination])

    def _movable(self, source: Instance) -> list[Movable]:
        """What the source may give away: it decodes, and has not come just now."""
        settled_s = self._loop.now_s - self._moves.cool_down_s
        weights = self._weights()
        return [
            Movable(job.id, *weights[request.tier], request.tokens)
            for request, job in source.jobs.items()
            if request.state is RequestState.RUNNING and request.decoding and job.moved_s <= settled_s
        ]

    def _waiting(self, source: Instance, *, ran_here: bool = False) -> list[Movable]:
        weights = self._weights()
        return [
            Movable(job.id, *weights[job.engine_request.tier], job.engine_request.tokens)
            for job in source.waiting_jobs()
            if job.ran_here or not ran_here
        ]

    def _weights(self) -> dict[str, tuple[int, float]]:
        return {tier.name: (tier.rank if self._policy.ranked else 0, tier.weight) for tier in self._policy.tiers.tiers}

    def _find(self, request: RequestId, source: Instance) -> Job:
        return next(job for job in source.jobs.values() if job.id == request)

    def _start(self, request: RequestId, source: Instance, destination: Instance) -> None:
        job = self._find(request, source)
        transfer = Transfer(job, source, destination, self._loop, self._cost, self._ended)
        if transfer.is_under_way:
            self._transfers[source.id] = transfer

    def _ended(self, transfer: Transfer, moved: bool) -> None:
        self._transfers.pop(transfer.source.id, None)
        if not moved:
            self._pairs.pop(transfer.source.id, None)
            return
        self.migrations += 1
        transfer.job.migrations += 1
        transfer.job.moved_s = self._loop.now_s
        self._stage.changed()
        pair = self._pairs.get(transfer.source.id)
        if pair is not None and self._still_holds(pair):
            self._work_on(pair)

    def _still_holds(self, pair: Pair) -> bool:
        views = tuple(self._stage.instances[name].view() for name in (pair.source, pair.destination))
        return any((each.source, each.reason) == (pair.source, pair.reason) for each in pair_up(self._moves, ClusterView(views)))
