import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import Cursor, Decoder, Event, EventTooLong
from tests.gateway.scripted import shown, told

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from([b"data: x", b"data:y", b": note", b"event: e", "data: 漢🦛".encode(), b"id: 4.0;1", b"data: [DONE]"])


def decode(pieces: list[bytes]) -> list[Event]:
    decoder = Decoder(10_000)
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


@given(st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), ENDS), max_size=6), st.data())
def test_events_do_not_depend_on_packets(blocks: list[tuple[list[bytes], bytes]], data: st.DataObject) -> None:
    whole = b"".join(end.join([*lines, b"", b""]) for lines, end in blocks) + b"\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    one_by_one = [whole[at : at + 1] for at in range(len(whole))]
    assert decode(pieces) == decode([whole]) == decode(one_by_one)
    assert len(decode([whole])) >= len(blocks)


def test_cursor_is_taken_off_and_nothing_else() -> None:
    events = decode([b"".join(told())])
    assert b"".join(event.raw for event in events) == shown(told())
    assert events[0].cursor == Cursor(1, 0, (101,))
    assert events[1].cursor == Cursor(1, 1, ())


@pytest.mark.parametrize("line", [b"id: 5\n", b"id: x.0;\n", b"identity: 1.0;\n", b"data: id: 1.0;2\n"])
def test_foreign_ids_are_kept(line: bytes) -> None:
    (event,) = decode([line + b"data: x\n\n"])
    assert event == Event(None, line + b"data: x\n\n")


@pytest.mark.parametrize("raw", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]\n"])
def test_end_mark(raw: bytes) -> None:
    (event,) = decode([raw])
    assert event.is_done


@pytest.mark.parametrize("raw", [b'data: "[DONE]"\n\n', b"data: [DONE] \n\n", b"data: a\ndata: [DONE]\n\n", b": [DONE]\n\n"])
def test_text_that_looks_like_an_end_mark(raw: bytes) -> None:
    (event,) = decode([raw])
    assert not event.is_done


def test_fields_by_the_standard() -> None:
    (event,) = decode([b"event:midstream\r\ndata: a\r\ndata:b\r\n: c\r\n\r\n"])
    assert event.type == b"midstream"
    assert event.field(b"data") == b"a\nb"
    (plain,) = decode([b"data: x\nevent: y\n\n"])
    assert plain.type == b""


def test_unfinished_event_is_dropped() -> None:
    assert decode([b"data: x\n\ndata: y"]) == [Event(None, b"data: x\n\n")]


def test_lone_carriage_return_waits_for_its_line_feed() -> None:
    decoder = Decoder(100)
    assert decoder.feed(b"data: x\r\n\r") == []
    assert decoder.feed(b"\ndata") == [Event(None, b"data: x\r\n\r\n")]


def test_too_long_event_does_not_lose_those_before() -> None:
    decoder = Decoder(10)
    assert len(decoder.feed(b"data: x\n\n" + b"y" * 20)) == 1
    with pytest.raises(EventTooLong):
        decoder.feed(b"")


def test_an_event_whose_last_byte_may_be_half_a_line_end_is_whole_when_nothing_follows() -> None:
    decoder = Decoder(1000)
    assert decoder.feed(b"data: 1\r\rdata: 2\r\r") == [Event(None, b"data: 1\r\r")]
    assert decoder.finish() == [Event(None, b"data: 2\r\r")]


@pytest.mark.parametrize(
    "raw",
    [
        b"event: message_stop\ndata: {}\n\n",
        b"event:x\n\n",
        b"event: a\nevent: b\n\n",
        b"event: a\r\ndata: 1\r\n\r\n",
        b"event: a\rdata: 1\r\r",
        b'event: delta\ndata: {"text": "event: x"}\n\n',
        b"event:  two\n\n",
        b": c\nevent: late\n\n",
        b"events: no\n\n",
        b"event\n\n",
    ],
)
def test_the_quick_way_to_a_type_finds_what_the_long_one_finds(raw: bytes) -> None:
    event = Event(None, raw)
    assert event.type == event.field(b"event")
