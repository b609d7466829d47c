import json

import pytest

from bench.chaos.verdict import DONE, Got, Verdict, comparable, judge

ERROR = b'data: {"error": {"message": "m", "type": "t", "param": null, "code": "c"}}\n\n'
EVENTS = [b'data: {"id":"R","created":0,"x":%d}\n\n' % at for at in range(3)]
RIGHT = b"".join(EVENTS) + DONE


def got(body: bytes, *, status: int = 200, stream: bool = True, ended: bool = True, gone: bool = False) -> Got:
    return Got("r-17", stream, status, body.replace(b'"R"', b'"r-17"').replace(b'"created":0', b'"created": 99'), ended, "", gone)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (got(RIGHT), Verdict.RIGHT),
        (got(b": keep-alive\n\nid: 3.0\n" + RIGHT), Verdict.RIGHT),
        (got(EVENTS[0] + ERROR + DONE), Verdict.LOST),
        (got(ERROR + DONE), Verdict.LOST),
        (got(EVENTS[1] + ERROR + DONE), Verdict.WRONG),
        (got(EVENTS[0] + EVENTS[0] + EVENTS[1] + EVENTS[2] + DONE), Verdict.WRONG),
        (got(EVENTS[0] + DONE), Verdict.WRONG),
        (got(EVENTS[0]), Verdict.TRUNCATED),
        (got(b""), Verdict.TRUNCATED),
        (got(EVENTS[0] + ERROR), Verdict.WRONG),
        (got(EVENTS[0], ended=False), Verdict.TRUNCATED),
        (got(EVENTS[0], ended=False, gone=True), Verdict.LOST),
        (got(EVENTS[1], ended=False, gone=True), Verdict.WRONG),
        (got(ERROR.removeprefix(b"data: "), status=502), Verdict.LOST),
        (got(b"Internal Server Error", status=500), Verdict.WRONG),
        (got(b'{"detail": "no"}', status=404), Verdict.WRONG),
    ],
)
def test_streams(answer: Got, verdict: Verdict) -> None:
    assert judge(answer, RIGHT) is verdict


def test_a_reader_that_waited_long_enough() -> None:
    answer = got(EVENTS[0], ended=False)
    answer.gave_up = True
    assert judge(answer, RIGHT) is Verdict.LOST


def test_plain_answers() -> None:
    right = b'{"id":"R","created":0}'
    assert judge(got(right, stream=False), right) is Verdict.RIGHT
    assert judge(got(right[:-1], stream=False), right) is Verdict.TRUNCATED
    assert judge(got(b"", stream=False, ended=False, gone=True), right) is Verdict.LOST
    assert judge(got(b'{"id":"X"}', stream=False), right) is Verdict.WRONG


@pytest.mark.parametrize(
    "error",
    [
        {"type": "error", "error": {"type": "api_error", "message": "m", "param": None, "code": "c"}},
        {"type": "error", "code": "c", "message": "m", "param": None},
    ],
)
def test_other_apis_end_with_an_event_of_their_own(error: dict[str, object]) -> None:
    begun, last = b"event: a\ndata: {}\n\n", b"event: z\ndata: {}\n\n"
    end = b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    right = begun + last
    verdicts = [judge(got(body), right) for body in (right, begun + end, end, last + end, begun, begun + b"event: error\ndata: {}\n\n")]
    assert verdicts == [Verdict.RIGHT, Verdict.LOST, Verdict.LOST, Verdict.WRONG, Verdict.TRUNCATED, Verdict.WRONG]


def test_names_are_chance_and_their_places_are_not() -> None:
    first, second, third = (digit * 16 for digit in (b"a", b"b", b"c"))

    def told(*names: bytes) -> bytes:
        return comparable(b" ".join(b"msg_" + name for name in names), "r")

    assert comparable(b"chatcmpl-tool-" + first, "r") == comparable(b"chatcmpl-tool-" + second, "r")
    assert told(first, second, first) == told(second, third, second)
    assert told(first, second, first) != told(first, second, second)
