import pytest

from bench.arena import WAYS
from bench.stream import Seen
from bench.tiers import Measured, _note, picture, table


def stream(start_s: float, gap_s: float, tokens: int) -> Seen:
    return Seen(started_s=start_s, at_s=[start_s + gap_s * number for number in range(1, tokens + 1)], done=True)


def test_gaps_alone_and_beside_the_load_are_told_apart() -> None:
    urgent = Seen(at_s=[0.0, 0.1, 0.2, 0.3, 0.4, 0.7, 1.0, 1.3], done=True)
    measured = Measured()
    _note(measured, urgent, [stream(0.4, 0.1, 9)])
    assert measured.alone_ms == pytest.approx([100, 100, 100])
    assert measured.beside_ms == pytest.approx([300, 300, 300])
    assert measured.ratios == pytest.approx([3.0])
    assert measured.batch_s == pytest.approx([0.9])


def test_a_stream_cut_short_is_a_failure() -> None:
    urgent = Seen(at_s=[0.0, 0.1, 0.2, 0.3, 0.5], done=True)
    cut = stream(0.25, 0.1, 3)
    cut.done = False
    measured = Measured()
    _note(measured, urgent, [cut])
    assert measured.failures == ["a stream is not whole"]


def test_load_that_never_met_the_stream_is_a_failure() -> None:
    measured = Measured()
    _note(measured, Seen(at_s=[0.0, 0.1, 0.2], done=True), [stream(5.0, 0.1, 3)])
    assert measured.failures
    assert not measured.ratios


def test_every_way_is_shown() -> None:
    measured = Measured()
    _note(measured, Seen(at_s=[0.0, 0.1, 0.2, 0.3, 0.6], done=True), [stream(0.25, 0.1, 5)])
    report = {"engine": "fake", "model": "m", "ways": {way: measured.as_json() for way in WAYS}}
    assert all(way in table(report) and way in picture(report) for way in WAYS)
