"""What a client got, and what may be said of it: the same as an unmoved answer, or an honest end."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

KEEP_ALIVE = b": keep-alive\n\n"
NAME = re.compile(rb"(chatcmpl-tool-|(?:resp|msg)_)[0-9a-f]{16}")
CREATED = re.compile(rb'"created(?:_at)?":\d+')


@dataclass
class Answer:
    """One answer, as far as it has come."""

    request: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    """It ended in good order, as HTTP goes."""
    failure: str = ""
    """How it broke, if it did."""

    @property
    def comparable(self) -> bytes:
        """The bytes without what differs between any two runs: the request's id, the second of creation, the comments that keep a silent
        stream open, and random names, for each of which stands its number."""
        same = self.body.replace(self.request.encode(), b"R").replace(KEEP_ALIVE, b"")
        names: dict[bytes, bytes] = {}

        def number(found: re.Match[bytes]) -> bytes:
            return names.setdefault(found[0], b"%s%d" % (found[1], len(names)))

        return NAME.sub(number, CREATED.sub(b'"created":0', same))

    @property
    def events(self) -> Sequence[bytes]:
        """The comparable bytes, cut after each event."""
        return re.findall(rb".*?\n\n", self.comparable, re.DOTALL)


def assert_same(answer: Answer, unmoved: Answer) -> None:
    """Whatever happened, it cannot be seen."""
    assert answer.whole, answer.failure
    assert answer.status == unmoved.status
    assert answer.comparable == unmoved.comparable, parting(answer, unmoved)
    assert len(set(CREATED.findall(answer.body))) == len(set(CREATED.findall(unmoved.body)))


def parting(answer: Answer, unmoved: Answer) -> str:
    """Where two answers part, for whoever reads of it."""
    pairs = zip_longest(answer.events, unmoved.events, fillvalue=b"(nothing)")
    number, one, other = next(((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]), (-1, b"", b""))
    return f"event {number} of {len(unmoved.events)}: {one!r} instead of {other!r}"


def assert_honest(answer: Answer, unmoved: Answer, codes: Sequence[str]) -> None:
    """It could not go on, and says so in OpenAI's way, after nothing but the beginning of the right answer."""
    assert answer.whole, answer.failure
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status == 502
        assert_error(answer.body, codes)
        return
    assert answer.status == 200
    assert b"".join(answer.events) == answer.comparable
    *shown, error, done = answer.events
    assert done == b"data: [DONE]\n\n"
    assert_error(error.removeprefix(b"data: "), codes)
    assert 0 < len(shown) < len(unmoved.events)
    assert shown == list(unmoved.events[: len(shown)])


def assert_error(raw: bytes, codes: Sequence[str]) -> None:
    """An error in OpenAI's shape."""
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] in codes
