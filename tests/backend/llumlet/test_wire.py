import base64
import json

import pytest

from backend.llumlet import wire
from backend.llumlet.wire import EventSplitter, EventStamper

EVENTS = [b'data: {"a":"h\xc3\xa9"}\n\n', b": ping\n\n", b"event: x\r\ndata: 1\r\n\r\n", b"data: a\rdata: b\r\r", b"data: [DONE]\n\n"]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_events_are_cut_wherever_the_bytes_are(step: int) -> None:
    stream = b"".join(EVENTS)
    splitter = EventSplitter()
    out = [event for start in range(0, len(stream), step) for event in splitter.push(stream[start : start + step])]
    assert out == EVENTS
    assert splitter.flush() == b""


def test_an_event_s_crlf_end_cut_in_two_stays_with_it() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"data: 1\r\n\r") == []
    assert splitter.push(b"\ndata: 2\r\n\r\n") == [b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"]


def test_one_line_end_is_not_the_end_of_an_event() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"data: 1\r\ndata: 2\r\n") == []
    assert splitter.flush() == b"data: 1\r\ndata: 2\r\n"
    assert splitter.flush() == b""


def test_empty_body_messages_bring_nothing() -> None:
    assert EventSplitter().push(b"") == []


def test_cursors_count_tokens_and_the_events_between_them() -> None:
    stamper = EventStamper()
    assert stamper.stamp([b"data: role\n\n"], ()) == b"id: 0.0;\ndata: role\n\n"
    assert stamper.stamp([b"data: a\n\n"], (7, 8)) == b"id: 2.0;7,8\ndata: a\n\n"
    assert stamper.stamp([b"data: u\n\n", b"data: [DONE]\n\n"], ()) == b"id: 2.1;\ndata: u\n\nid: 2.2;\ndata: [DONE]\n\n"


def test_only_the_first_of_several_events_carries_the_tokens() -> None:
    assert EventStamper().stamp([b"data: a\n\n", b"data: b\n\n"], (9,)) == b"id: 1.0;9\ndata: a\n\nid: 1.1;\ndata: b\n\n"


def test_comments_get_no_cursor_and_lose_no_tokens() -> None:
    stamper = EventStamper()
    assert stamper.stamp([b": ping\n\n"], (5,)) == b": ping\n\n"
    assert stamper.tokens == 0
    assert stamper.stamp([b": ping\n\n", b"data: a\n\n"], (5,)) == b": ping\n\nid: 1.0;5\ndata: a\n\n"


@pytest.mark.parametrize(
    ("block", "comment"),
    [(b": x\n\n", True), (b":\r\n\r\n", True), (b"\n\n", True), (b": x\ndata: 1\n\n", False), (b"data: 1\n: x\n\n", False)],
)
def test_what_is_a_comment(block: bytes, comment: bool) -> None:
    assert wire.is_comment(block) is comment


def test_progress_has_one_event_a_token() -> None:
    assert wire.progress_events(10, (7, 9)) == b"id: 11.0;7\n\nid: 12.0;9\n\n"


def test_created_is_rewritten_once_and_only_where_it_is_the_run_s_own() -> None:
    text = json.dumps({"id": "x", "created": 123, "text": '"created":123', "more": {"created": 123}}).encode()
    assert wire.find_created(text) == 123
    assert wire.replace_created(text, 123, 99) == text.replace(b"123", b"99", 1)
    assert wire.replace_created(text, 124, 99) == text
    assert wire.find_created(b"data: [DONE]\n\n") is None
    assert wire.replace_created(b"data: [DONE]\n\n", 1, 2) == b"data: [DONE]\n\n"


def test_created_inside_text_is_never_taken_for_it() -> None:
    assert wire.find_created(json.dumps({"text": 'x "created":123 y'}).encode()) is None


def test_control_events() -> None:
    assert wire.moving_event(1, "i2", "http://h:1") == (
        b'event: midstream\ndata: {"kind":"moving","epoch":1,"instance":"i2","url":"http://h:1"}\n\n'
    )
    assert wire.kept_event(1) == b'event: midstream\ndata: {"kind":"kept","epoch":1}\n\n'
    assert wire.moved_event(2) == b'event: midstream\ndata: {"kind":"moved","epoch":2}\n\n'
    assert wire.lost_event("link") == b'event: midstream\ndata: {"kind":"lost","reason":"link"}\n\n'
    assert wire.head_event(200, [(b"Content-Type", b"text/plain")]) == (
        b'event: midstream\ndata: {"kind":"head","status":200,"headers":[["content-type","text/plain"]]}\n\n'
    )


def test_answers_travel_as_base64() -> None:
    first, second, *_ = wire.answer_event(200, [(b"a", b"b")], b"\xff{}").split(b"\n")
    assert first == b"event: midstream.answer"
    answer = json.loads(second.removeprefix(b"data: "))
    assert answer == {"status": 200, "headers": [["a", "b"]], "body": base64.b64encode(b"\xff{}").decode()}
