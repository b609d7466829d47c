from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import Cursor, Decoder, Event
from gateway.stream_ends import MESSAGES, RESPONSES, last_events
from gateway.transcript import Transcript, Verdict
from tests.gateway.scripted import control, told, told_message, told_response


def at(tokens: int, sub: int, ids: Sequence[int] = ()) -> Event:
    return Event(Cursor(tokens, sub, tuple(ids)), b"data: x\n\n")


@st.composite
def stories(draw: st.DrawFn) -> list[Event]:
    """The events of one request, as any instance tells them."""
    events: list[Event] = []
    tokens = 0
    for grown in draw(st.lists(st.integers(0, 3), min_size=1, max_size=12)):
        sub = 0 if grown or not events else _sub_of(events[-1]) + 1
        events.append(at(tokens + grown, sub, range(tokens + 1, tokens + grown + 1)))
        tokens += grown
    return events


def _sub_of(event: Event) -> int:
    assert event.cursor is not None
    return event.cursor.sub


@given(stories(), st.data())
def test_two_tellings_make_one_story(events: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    transcript = Transcript()
    shown = [event for event in events[:cut] if transcript.judge(event) is Verdict.NEW]
    transcript.rejoin()
    shown += [event for event in events if transcript.judge(event) is Verdict.NEW]
    assert shown == events
    assert transcript.contiguous
    assert transcript.token_ids == list(range(1, transcript.tokens + 1))


@given(stories(), st.data())
def test_missing_event_is_never_passed_over(events: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events) - 1))
    transcript = Transcript()
    for event in events[:cut]:
        transcript.judge(event)
    transcript.rejoin()
    verdicts = [transcript.judge(event) for event in events[: max(0, cut)] + events[cut + 1 :]]
    after = verdicts[cut:]
    if after:
        next_event, lost = events[cut + 1], events[cut]
        assert next_event.cursor is not None
        assert lost.cursor is not None
        brings_nothing = lost.cursor.ids == () and next_event.cursor.tokens > lost.cursor.tokens
        assert after[0] is (Verdict.NEW if brings_nothing else Verdict.GAP)


@pytest.mark.parametrize("event", [at(7, 0, (7,)), at(5, 3), at(6, 1, (6,)), at(6, 0, (5, 6)), Event(None, b"data: x\n\n")])
def test_gap(event: Event) -> None:
    transcript = Transcript()
    transcript.judge(at(5, 1, (1, 2, 3, 4, 5)))
    transcript.rejoin()
    assert transcript.judge(event) is Verdict.GAP


def test_direct_stream_with_odd_ids_is_shown_but_is_no_basis_for_resuming() -> None:
    transcript = Transcript()
    assert transcript.judge(at(5, 0, (1, 2))) is Verdict.NEW
    assert not transcript.contiguous


def test_comments_of_an_attachment_are_dropped_until_it_has_caught_up() -> None:
    transcript = Transcript()
    transcript.rejoin()
    assert transcript.judge(Event(None, b": ping\n\n")) is Verdict.OLD
    transcript.judge(at(1, 0, (1,)))
    assert not transcript.joining
    assert transcript.judge(Event(None, b": ping\n\n")) is Verdict.NEW


ODD = (
    b": a comment\n\n",
    b"\n\n",
    b"\n",
    b"data: x\r\n\r\n",
    b"id: 7\ndata: x\n\n",
    b"id: 2.0;1,,2\ndata: x\n\n",
    b"id: 3.0;4294967296\n\n",
    b"id: 1.1;\n\n",
    b"id: 1.1;\r\ndata: x\n\n",
    b"event: midstream\ndata: {}\n\n",
    b"data: half",
    b"data: x\nid: 5\n\n",
    b'data: "[DONE]"\n\n',
    b"data: [DONE]\n\n",
)
PATHS = ("/v1/chat/completions", MESSAGES, RESPONSES)


@given(
    st.lists(st.sampled_from([*told(), *told_message(), *told_response(), *ODD, b"id: 5.0;104,105\ndata: x\n\n"]), max_size=8),
    st.sampled_from(PATHS),
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_the_quick_way_is_the_long_one(pieces: list[bytes], path: str, together: list[int]) -> None:
    """Whatever comes in whichever reads: shown and noted is the same, and what needs more than passing on is never passed on."""
    quick, slow = Transcript(last_events(path)), Transcript(last_events(path))
    decoders = Decoder(10**6), Decoder(10**6)
    for count in together:
        data, pieces = b"".join(pieces[:count]), pieces[count:]
        expected = b"".join(one.raw for one in decoders[0].feed(data) if slow.judge(one) is Verdict.NEW and not one.is_blank)
        way = quick.pass_on(data) if decoders[1].is_between_events else None
        passed = way[0] if way else b""
        if way is None:
            passed = b"".join(one.raw for one in decoders[1].feed(data) if quick.judge(one) is Verdict.NEW and not one.is_blank)
        elif b"event: midstream" in data or slow.complete:
            pytest.fail("passed on")
        assert passed == expected
        assert (quick.token_ids, quick.tokens, quick.contiguous) == (slow.token_ids, slow.tokens, slow.contiguous)
        assert (quick.created, quick.complete) == (slow.created, slow.complete)
        if slow.complete:
            return


@pytest.mark.parametrize(
    ("path", "events"), [(PATHS[0], told("abcde")), (MESSAGES, told_message("abcde")), (RESPONSES, told_response("abcde"))]
)
def test_all_but_first_and_last_take_the_quick_way(path: str, events: list[bytes]) -> None:
    transcript = Transcript(last_events(path))
    quick = [data for data in events if transcript.pass_on(data) is not None or transcript.judge(Decoder(10**6).feed(data)[0]) is None]
    assert len(quick) >= len(events) - 3
    assert events[-1] not in quick
    assert transcript.complete


def test_nothing_is_passed_on_while_two_streams_are_joined() -> None:
    transcript = Transcript()
    first, second, *_ = told()
    transcript.judge(Decoder(10**6).feed(first)[0])
    transcript.rejoin()
    assert transcript.pass_on(second) is None
    assert transcript.pass_on(control(kind="kept", epoch=1)) is None


def test_a_mark_is_put_on_every_event_that_has_a_cursor() -> None:
    transcript = Transcript()
    first, *rest = told("abcde")
    transcript.judge(Decoder(10**6).feed(first)[0])
    passed = transcript.pass_on(b"".join(rest[:3]), lambda event, noted: b"%d:" % noted.tokens + event.raw)
    assert passed is not None
    shown = [one.raw for one in Decoder(10**6).feed(b"".join(rest[:3]))]
    assert passed == (b"".join(b"%d:" % n + raw for n, raw in enumerate(shown, start=1)), 2)
