"""PURE. One order to start or to stop instances, as a document: what is to happen to each of them, how far it is, and what has happened.

Each instance of an operation is in a phase; an event takes it to the next, by these tables, and by nothing else. What is
cancelled goes back the way it came; once a process was told to stop there is no way back.

    scale out                                             scale in
    pending ──launched──► starting ──ready──► done        pending ──drain_ordered──► draining ──drained──► stopping ──gone──► done
       ▲ ◄─refused         │      │cancelled                 │cancelled                 │cancelled
       │ gone       failed │      ▼                          ▼                          ▼
       └─────── clearing ◄─┘   withdrawing ──gone──►       cancelled ◄──returned──── returning
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from migration.leg import InstanceId, RequestId
from migration.typed_json import decode, encode

MAX_STEPS = 1000
MAX_REQUESTS = 1000


class IllegalEvent(Exception):
    """An event that the table does not know in that phase."""


class OperationKind(StrEnum):
    """What was ordered."""

    SCALE_OUT = "scale_out"
    SCALE_IN = "scale_in"


class Phase(StrEnum):
    """How far one instance of an operation is."""

    PENDING = "pending"
    STARTING = "starting"
    """Its process runs, and is not ready yet."""
    CLEARING = "clearing"
    """It did not become ready; what is left of it goes, then it is tried again."""
    WITHDRAWING = "withdrawing"
    """Cancelled while it started."""
    DRAINING = "draining"
    RETURNING = "returning"
    """Cancelled while it drained: to take requests again."""
    STOPPING = "stopping"
    """The process was told to stop."""
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class OperationEvent(StrEnum):
    """What happened to one instance of an operation."""

    LAUNCHED = "launched"
    REFUSED = "refused"
    """The launcher did not do it this time."""
    READY = "ready"
    FAILED = "failed"
    """It died while it started, or took too long."""
    DRAIN_ORDERED = "drain_ordered"
    DRAINED = "drained"
    OVERDUE = "overdue"
    """Its requests did not all leave in time."""
    RETURNED = "returned"
    GONE = "gone"
    """The launcher knows no such process any more."""
    CANCELLED = "cancelled"
    GAVE_UP = "gave_up"
    """It was tried often enough."""


Table = Mapping[Phase, Mapping[OperationEvent, Phase]]

TABLES: Mapping[OperationKind, Table] = {
    OperationKind.SCALE_OUT: {
        Phase.PENDING: {
            OperationEvent.LAUNCHED: Phase.STARTING,
            OperationEvent.REFUSED: Phase.PENDING,
            OperationEvent.GAVE_UP: Phase.FAILED,
            OperationEvent.CANCELLED: Phase.WITHDRAWING,  # a launch may be under way
        },
        Phase.STARTING: {
            OperationEvent.READY: Phase.DONE,
            OperationEvent.FAILED: Phase.CLEARING,
            OperationEvent.CANCELLED: Phase.WITHDRAWING,
        },
        Phase.CLEARING: {
            OperationEvent.GONE: Phase.PENDING,
            OperationEvent.REFUSED: Phase.CLEARING,
            OperationEvent.CANCELLED: Phase.WITHDRAWING,
        },
        Phase.WITHDRAWING: {OperationEvent.GONE: Phase.CANCELLED, OperationEvent.REFUSED: Phase.WITHDRAWING},
    },
    OperationKind.SCALE_IN: {
        Phase.PENDING: {
            OperationEvent.DRAIN_ORDERED: Phase.DRAINING,
            OperationEvent.OVERDUE: Phase.STOPPING,
            OperationEvent.CANCELLED: Phase.RETURNING,  # an order to drain may be under way
        },
        Phase.DRAINING: {
            OperationEvent.DRAINED: Phase.STOPPING,
            OperationEvent.OVERDUE: Phase.STOPPING,
            OperationEvent.CANCELLED: Phase.RETURNING,
        },
        Phase.RETURNING: {OperationEvent.RETURNED: Phase.CANCELLED},
        Phase.STOPPING: {OperationEvent.GONE: Phase.DONE, OperationEvent.REFUSED: Phase.STOPPING, OperationEvent.GAVE_UP: Phase.FAILED},
    },
}
FINAL = frozenset({Phase.DONE, Phase.CANCELLED, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class Subject:
    """One instance of an operation. `attempts` counts what the launcher refused and launches that failed."""

    instance: InstanceId
    phase: Phase = Phase.PENDING
    attempts: int = 0

    @property
    def is_active(self) -> bool:
        return self.phase not in FINAL


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened. `at` is UTC, ISO 8601, by the clock of the gateway that saw it."""

    at: str
    instance: InstanceId
    event: OperationEvent
    phase: Phase
    """The phase after it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of a request on an instance that drained: `result` as of a migration."""

    request: RequestId
    instance: InstanceId
    destination: InstanceId
    result: str
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Operation:
    """See above. `model` None: whatever the launcher starts by default. `origin`: who ordered it, `admin` or `autoscaler`."""

    id: str
    kind: OperationKind
    origin: str
    created: str
    model: str | None
    subjects: tuple[Subject, ...]
    steps: tuple[Step, ...] = ()
    requests: tuple[RequestOutcome, ...] = ()

    @property
    def active(self) -> Sequence[Subject]:
        """The instances that are not through."""
        return [subject for subject in self.subjects if subject.is_active]

    @property
    def state(self) -> str:
        """`running`; then `failed` if anything failed, `cancelled` if anything was cancelled, `done` otherwise."""
        phases = {subject.phase for subject in self.subjects}
        if phases - FINAL:
            return "running"
        return next((phase.value for phase in (Phase.FAILED, Phase.CANCELLED) if phase in phases), "done")

    def find(self, instance: InstanceId) -> Subject | None:
        """That instance of it."""
        return next((subject for subject in self.subjects if subject.instance == instance), None)

    def after(self, instance: InstanceId, event: OperationEvent, at: str, note: str = "") -> "Operation":
        """The operation after that event. Raises IllegalEvent."""
        subject = self.find(instance)
        phase = TABLES[self.kind].get(subject.phase, {}).get(event) if subject else None
        if subject is None or phase is None:
            raise IllegalEvent(f"{event} of {instance} in {subject.phase if subject else 'an operation without it'}")
        failed = event in (OperationEvent.REFUSED, OperationEvent.FAILED)
        changed = replace(subject, phase=phase, attempts=subject.attempts + failed)
        step = Step(at, instance, event, phase, note)
        subjects = tuple(changed if each is subject else each for each in self.subjects)
        return replace(self, subjects=subjects, steps=(*self.steps, step)[-MAX_STEPS:])

    def named(self, was: InstanceId, instance: InstanceId) -> "Operation":
        """With the name that the launcher has given an instance."""
        subjects = tuple(replace(each, instance=instance) if each.instance == was else each for each in self.subjects)
        return replace(self, subjects=subjects)

    def cancelled(self, at: str) -> "Operation":
        """With all cancelled that still can be. Raises IllegalEvent if nothing can."""
        operation = self
        for subject in self.subjects:
            if OperationEvent.CANCELLED in TABLES[self.kind].get(subject.phase, {}):
                operation = operation.after(subject.instance, OperationEvent.CANCELLED, at)
        if operation is self:
            raise IllegalEvent(f"nothing of {self.id} can be cancelled any more")
        return operation

    def with_requests(self, outcomes: Sequence[RequestOutcome]) -> "Operation":
        """With these as the latest word on their requests."""
        known = {(each.instance, each.request): each for each in (*self.requests, *outcomes)}
        return replace(self, requests=tuple(known.values())[-MAX_REQUESTS:])

    def to_json(self) -> str:
        return json.dumps(encode(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Operation":
        """Raises ValueError."""
        return decode(Operation, json.loads(text))
