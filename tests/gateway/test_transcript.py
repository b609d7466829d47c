from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import Cursor, Event
from gateway.transcript import Transcript, Verdict


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
