"""PURE. The one budget of all attempts at one request: who has failed it, what a failure means, and in which epoch it goes on."""

from dataclasses import dataclass
from enum import Enum, auto

from gateway.errors import UpstreamFailed, UpstreamPreempted
from gateway.policy.view import ClusterView, InstanceView
from gateway.resuming import can_take_over, next_epoch
from migration.leg import InstanceId


class Next(Enum):
    """What follows a failure."""

    ANEW = auto()
    """Another instance begins from nothing: the client has seen nothing."""
    RESUME = auto()
    """Another instance goes on from what the client has seen."""
    SHOW = auto()
    """The client sees the failure."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`counted` is an outcome and a reason of an attempt to resume, for the metric, if there is one to tell."""

    next: Next
    counted: tuple[str, str] | None = None


class Attempts:
    """Owned by one relay. `max_attempts` bounds failures in a row without a new event, `max_resumes` goings-on in all."""

    def __init__(self, max_attempts: int, max_resumes: int) -> None:
        self._max_attempts = max_attempts
        self._max_resumes = max_resumes
        self._asked: dict[InstanceId, str] = {}
        self._tried: dict[InstanceId, str] = {}
        self._fruitless = 0
        self._resumes = 0
        self.resuming: str | None = None
        """Why the request is going on elsewhere, from the failure on until the client sees something new."""
        self.failure: UpstreamFailed | None = None
        """What the client is told if nobody can help: the last failure before its first token, and the first of an outage after it."""
        self.failed_at_s = 0.0
        self.under_way = False
        """It has had output tokens, here or there: worth waiting for an instance that takes it."""
        self.in_line = False
        """It was preempted, and waits in line as if it had come just now."""
        self.came_back = False
        """Its client has seen events of it at another gateway."""
        self.epoch = 0
        self._announced = 0

    def excluded(self, cluster: ClusterView) -> frozenset[InstanceId]:
        """Who is not asked: one that has failed this request, unless it was started anew since, and one that could not go on with it."""
        failed = {view.id for view in cluster.instances if self._tried.get(view.id) == view.report.incarnation}
        unfit = {view.id for view in cluster.instances if self.resuming is not None and not can_take_over(view)}
        return frozenset(failed | unfit)

    def ask(self, instance: InstanceView) -> None:
        """That instance is about to be asked."""
        self._asked[instance.id] = instance.report.incarnation

    def blame(self, instance: InstanceId, cluster: ClusterView) -> None:
        """That instance has failed the request, in the incarnation that was asked; if it moved there, in the one that is known now."""
        view = cluster.find(instance)
        self._tried[instance] = self._asked.get(instance) or (view.report.incarnation if view is not None else "")

    def decide(self, failure: UpstreamFailed, now_s: float, *, shown: bool, tokens: int, why_not: str | None) -> Decision:
        """What a failure means. `shown`: the client has seen bytes; `why_not`: what keeps the request from being resumed."""
        self.in_line = isinstance(failure, UpstreamPreempted) and why_not is None and (shown or tokens > 0)
        if self.in_line:
            self._step_aside(failure, now_s)
            return Decision(Next.RESUME)
        self._fruitless += 1
        if self.resuming is None or self.failure is None:
            self.failure, self.failed_at_s = failure, now_s
        if self._fruitless >= self._max_attempts:
            return Decision(Next.SHOW, ("failed", failure.reason) if self.resuming else None)
        self.under_way = self.under_way or shown or tokens > 0
        if not (shown or tokens):
            self.resuming = None
            return Decision(Next.ANEW)
        reason = "too_often" if self._resumes >= self._max_resumes else why_not
        self._resumes += 1
        if reason is None:
            self.resuming = self.resuming or failure.reason
            return Decision(Next.RESUME)
        self.resuming = None
        may_begin_anew = not shown and reason != "too_often"
        return Decision(Next.ANEW if may_begin_anew else Next.SHOW, ("refused", reason))

    def _step_aside(self, failure: UpstreamFailed, now_s: float) -> None:
        """Nothing has gone wrong, and nothing is used up but the epoch."""
        self._fruitless = max(1, self._fruitless)
        self.failure, self.failed_at_s = failure, now_s
        self.under_way = True
        self.resuming = self.resuming or failure.reason

    def take_over(self, epoch: int, reason: str, *, has_seen: bool) -> None:
        """Another gateway's client has come: go on, from that epoch and the tokens that were kept."""
        self.epoch = self._announced = epoch
        self.resuming = reason
        self.came_back = has_seen
        self.under_way = True

    def next_epoch(self) -> int:
        """The epoch of the attempt that is about to be made."""
        if self._fruitless:
            self.epoch = self._announced = next_epoch(self._announced)
        return self.epoch

    def announced(self, epoch: int) -> None:
        """A move was announced with that epoch: it is used up."""
        self._announced = max(self._announced, epoch)

    def progressed(self) -> None:
        """The client sees something new."""
        self._fruitless = 0

    def joined(self) -> str | None:
        """What the client has seen goes on; answers why, if it was resumed."""
        reason, self.resuming, self.failure = self.resuming, None, None
        return reason
