"""The tables of an operation, by transcripts and by whatever order of events chance finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scaling.book import Book
from gateway.scaling.operation import (
    FINAL,
    MAX_REQUESTS,
    MAX_STEPS,
    TABLES,
    IllegalEvent,
    Operation,
    OperationEvent,
    OperationKind,
    Phase,
    RequestOutcome,
    Subject,
)
from migration.leg import InstanceId, RequestId

A, B = InstanceId("a"), InstanceId("b")
E = OperationEvent
AT = "2030-01-01T00:00:00+00:00"


def an_operation(kind: OperationKind, *instances: InstanceId, name: str = "op-1") -> Operation:
    return Operation(name, kind, "admin", AT, "m", tuple(Subject(each) for each in instances or (A,)))


def after(operation: Operation, *events: OperationEvent) -> Operation:
    for event in events:
        operation = operation.after(A, event, AT)
    return operation


OUT, IN = an_operation(OperationKind.SCALE_OUT), an_operation(OperationKind.SCALE_IN)


@pytest.mark.parametrize(
    ("operation", "events", "state"),
    [
        (OUT, (E.LAUNCHED, E.READY), "done"),
        (OUT, (E.REFUSED, E.REFUSED, E.LAUNCHED, E.FAILED, E.GONE, E.LAUNCHED, E.READY), "done"),
        (OUT, (E.REFUSED, E.GAVE_UP), "failed"),
        (OUT, (E.CANCELLED, E.GONE), "cancelled"),
        (OUT, (E.LAUNCHED, E.CANCELLED, E.GONE), "cancelled"),
        (OUT, (E.LAUNCHED, E.FAILED, E.CANCELLED, E.REFUSED, E.GONE), "cancelled"),
        (IN, (E.DRAIN_ORDERED, E.DRAINED, E.GONE), "done"),
        (IN, (E.DRAIN_ORDERED, E.OVERDUE, E.REFUSED, E.GONE), "done"),
        (IN, (E.OVERDUE, E.GONE), "done"),
        (IN, (E.DRAIN_ORDERED, E.CANCELLED, E.RETURNED), "cancelled"),
        (IN, (E.CANCELLED, E.RETURNED), "cancelled"),
        (IN, (E.DRAIN_ORDERED, E.DRAINED, E.REFUSED, E.GAVE_UP), "failed"),
    ],
)
def test_ways_of_an_operation(operation: Operation, events: tuple[OperationEvent, ...], state: str) -> None:
    assert after(operation, *events[:-1]).state == "running"
    over = after(operation, *events)
    assert (over.state, [step.event for step in over.steps]) == (state, list(events))
    assert not over.active


def test_what_fails_is_counted_and_noted() -> None:
    operation = OUT.after(A, E.REFUSED, AT, "no room").after(A, E.LAUNCHED, AT).after(A, E.FAILED, AT, "it died")
    assert operation.subjects == (Subject(A, Phase.CLEARING, 2),)
    assert [step.note for step in operation.steps] == ["no room", "", "it died"]


def test_nothing_is_cancelled_once_the_process_was_told_to_stop() -> None:
    stopping = after(IN, E.DRAIN_ORDERED, E.DRAINED)
    for operation in (stopping, after(stopping, E.GONE), after(OUT, E.LAUNCHED, E.READY)):
        with pytest.raises(IllegalEvent):
            operation.cancelled(AT)


def test_cancelling_spares_what_is_past_it() -> None:
    two = an_operation(OperationKind.SCALE_IN, A, B)
    cancelled = after(two, E.DRAIN_ORDERED, E.DRAINED).cancelled(AT)
    assert [each.phase for each in cancelled.subjects] == [Phase.STOPPING, Phase.RETURNING]
    over = after(cancelled, E.GONE).after(B, E.RETURNED, AT)
    assert over.state == "cancelled"


def test_an_instance_that_is_not_in_it() -> None:
    with pytest.raises(IllegalEvent):
        IN.after(B, E.GONE, AT)


events = st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from(list(E))), max_size=60)


@given(st.sampled_from(list(OperationKind)), events)
def test_whatever_happens_an_operation_stays_in_its_tables(kind: OperationKind, happened: list[tuple[InstanceId, OperationEvent]]) -> None:
    operation = an_operation(kind, A, B)
    told_to_stop: set[InstanceId] = set()
    for instance, event in happened:
        subject = operation.find(instance)
        assert subject is not None
        try:
            operation = operation.after(instance, event, AT)
        except IllegalEvent:
            assert event not in TABLES[kind].get(subject.phase, {})
            continue
        now = operation.find(instance)
        assert now is not None
        assert subject.phase not in FINAL
        assert now.attempts >= subject.attempts
        # There is no way back from a process that was told to stop.
        if now.phase is Phase.STOPPING:
            told_to_stop.add(instance)
        if instance in told_to_stop:
            assert now.phase in (Phase.STOPPING, Phase.DONE, Phase.FAILED)
    assert Operation.from_json(operation.to_json()) == operation
    assert (operation.state == "running") == bool(operation.active)


@given(st.sampled_from(list(OperationKind)))
def test_every_phase_has_a_way_to_an_end(kind: OperationKind) -> None:
    ends = set(FINAL)
    while more := {phase for phase, row in TABLES[kind].items() if phase not in ends and ends & set(row.values())}:
        ends |= more
    assert set(TABLES[kind]) <= ends


def test_lists_are_bounded() -> None:
    operation = OUT
    for _ in range(MAX_STEPS + 10):
        operation = operation.after(A, E.REFUSED, AT)
    outcomes = [RequestOutcome(RequestId(f"r{n}"), A, B, "moved", "", 1) for n in range(MAX_REQUESTS + 10)]
    operation = operation.with_requests(outcomes)
    assert (len(operation.steps), len(operation.requests)) == (MAX_STEPS, MAX_REQUESTS)
    assert operation.requests[-1].request == f"r{MAX_REQUESTS + 9}"


def test_the_latest_word_on_a_request_counts() -> None:
    first, last = (RequestOutcome(RequestId("r"), A, B, result, "", 1) for result in ("refused", "moved"))
    assert IN.with_requests([first]).with_requests([last]).requests == (last,)


def test_a_second_order_for_an_instance_is_the_first_one() -> None:
    first = an_operation(OperationKind.SCALE_IN, A, name="op-1")
    second = an_operation(OperationKind.SCALE_IN, B, A, name="op-2")
    book, answered = Book().ordered(first)
    assert answered == first
    assert book.ordered(second) == (book, first)
    assert book.busy == {A}
    over = book.changed("op-1", lambda each: after(each, E.OVERDUE, E.GONE))
    again, answered = over.ordered(second)
    assert answered == second
    assert Book.from_json(again.to_json()) == again
    assert again.without("op-1").operations == (second,)
    with pytest.raises(KeyError):
        book.changed("op-9", lambda each: each)
