"""PURE. All operations that are not over, in one document, so that two orders for one instance cannot pass each other."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.scaling.operation import Operation, OperationKind
from migration.leg import InstanceId
from migration.typed_json import decode, encode


@dataclass(frozen=True, slots=True)
class Book:
    """Oldest first."""

    operations: tuple[Operation, ...] = ()

    def find(self, operation: str) -> Operation | None:
        """The one with that id."""
        return next((each for each in self.operations if each.id == operation), None)

    def of_instance(self, instance: InstanceId) -> Operation | None:
        """The one in which that instance is not through."""
        return next((each for each in self.operations if any(subject.instance == instance for subject in each.active)), None)

    @property
    def busy(self) -> frozenset[InstanceId]:
        """Instances that an operation is at work on."""
        return frozenset(subject.instance for each in self.operations for subject in each.active)

    def ordered(self, operation: Operation) -> tuple["Book", Operation]:
        """With a new operation; or, if one stops such an instance already, as it is, with that one."""
        if operation.kind is OperationKind.SCALE_IN:
            for subject in operation.subjects:
                known = self.of_instance(subject.instance)
                if known is not None:
                    return self, known
        return replace(self, operations=(*self.operations, operation)), operation

    def changed(self, operation: str, change: Callable[[Operation], Operation]) -> "Book":
        """With that one changed. Raises KeyError if it is not here."""
        if self.find(operation) is None:
            raise KeyError(operation)
        return replace(self, operations=tuple(change(each) if each.id == operation else each for each in self.operations))

    def without(self, operation: str) -> "Book":
        return replace(self, operations=tuple(each for each in self.operations if each.id != operation))

    def to_json(self) -> str:
        return json.dumps(encode(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Book":
        """Raises ValueError."""
        return decode(Book, json.loads(text))
