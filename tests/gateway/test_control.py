import pytest

from gateway.control import Answer, Control, ControlError, Head, Kept, Lost, Moved, Moving, parse_control
from gateway.sse import Event
from migration.leg import InstanceId
from tests.gateway.scripted import answer_event, control

CASES: list[tuple[bytes, Control]] = [
    (control(kind="moving", epoch=1, instance="b", url="http://b"), Moving(1, InstanceId("b"), "http://b")),
    (control(kind="kept", epoch=1), Kept(1)),
    (control(kind="moved", epoch=2), Moved(2)),
    (control(kind="lost", reason="silent"), Lost("silent")),
    (control(kind="head", status=200, headers=[["X-A", "b"]]), Head(200, ((b"x-a", b"b"),))),
    (answer_event(b"\x00\xff"), Answer(200, ((b"content-type", b"application/json"),), b"\x00\xff")),
]


@pytest.mark.parametrize(("raw", "expected"), CASES)
def test_known(raw: bytes, expected: Control) -> None:
    assert parse_control(Event(None, raw)) == expected


@pytest.mark.parametrize("raw", [b"data: event: midstream\n\n", b"event: message\ndata: {}\n\n", b": event: midstream\n\n"])
def test_the_clients_events(raw: bytes) -> None:
    assert parse_control(Event(None, raw)) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"event: midstream\n\n",
        b"event: midstream\ndata: []\n\n",
        control(kind="moving", epoch="1", instance="b", url="u"),
        control(kind="head", status=200),
        b"event: midstream.answer\ndata: {}\n\n",
        b'event: midstream.answer\ndata: {"status":200,"headers":[],"body":"!"}\n\n',
    ],
)
def test_malformed(raw: bytes) -> None:
    with pytest.raises(ControlError):
        parse_control(Event(None, raw))
