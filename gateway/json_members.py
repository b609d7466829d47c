"""PURE. The members of a JSON object at its top level, found without parsing what they hold. For bodies that are large.

Strings are passed over by searching for their end, containers by hopping from bracket to bracket. Whether what lies within is JSON
at all is not judged: that is left to the engine.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SPACE = re.compile(rb"[ \t\r\n]*")
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_NO_MARK = re.compile(rb'[^"\[\]{}]*+')
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\[\]{}\"]+")
_BACKSLASH = ord("\\")


class NotAnObject(ValueError):
    """What was looked at is not a JSON object."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member: its name, and where its value lies."""

    name: str
    start: int
    end: int


def members(body: bytes) -> Iterator[Member]:
    """The members in their order. Raises NotAnObject, at the latest where the object should have ended."""
    at = _SPACE.match(body, 0).end()  # type: ignore[union-attr]  # it matches anything
    if body[at : at + 1] != b"{":
        raise NotAnObject("the body is not a JSON object")
    at = _after_space(body, at + 1)
    if body[at : at + 1] == b"}":
        _end(body, at + 1)
        return
    while True:
        if body[at : at + 1] != b'"':
            raise NotAnObject(f"a name is missing at byte {at}")
        name_end = string_end(body, at + 1)
        colon = _COLON.match(body, name_end)
        if colon is None:
            raise NotAnObject(f"a colon is missing at byte {name_end}")
        end = _value_end(body, colon.end())
        yield Member(_name(body[at:name_end]), colon.end(), end)
        at = _after_space(body, end)
        mark = body[at : at + 1]
        if mark == b"}":
            _end(body, at + 1)
            return
        if mark != b",":
            raise NotAnObject(f"a comma is missing at byte {at}")
        at = _after_space(body, at + 1)


def _after_space(body: bytes, at: int) -> int:
    return _SPACE.match(body, at).end()  # type: ignore[union-attr]  # it matches anything


def _end(body: bytes, at: int) -> None:
    if _after_space(body, at) != len(body):
        raise NotAnObject(f"more follows the object at byte {at}")


def _name(raw: bytes) -> str:
    try:
        return str(json.loads(raw))
    except ValueError as error:
        raise NotAnObject(f"a name is no string: {error}") from error


def string_end(body: bytes, at: int) -> int:
    """Behind the quote that ends the string whose text begins at `at`. Raises NotAnObject. Texts without escaped quotes cost least."""
    end = body.find(b'"', at)
    if end >= 0 and body[end - 1] != _BACKSLASH:
        return end + 1
    found = _REST_OF_STRING.match(body, at)
    if found is None:
        raise NotAnObject("a string does not end")
    return found.end()


def _value_end(body: bytes, at: int) -> int:
    first = body[at : at + 1]
    if first == b'"':
        return string_end(body, at + 1)
    if first in (b"[", b"{"):
        return _container_end(body, at)
    scalar = _SCALAR.match(body, at)
    if scalar is None:
        raise NotAnObject(f"a value is missing at byte {at}")
    return scalar.end()


def _container_end(body: bytes, at: int) -> int:
    flat = body.find(b"]", at) if body[at : at + 1] == b"[" else -1
    if flat >= 0 and all(body.find(mark, at + 1, flat) < 0 for mark in (b'"', b"[", b"{")):
        return flat + 1  # a list of numbers: token ids, mostly
    depth = 0
    while True:
        at = _NO_MARK.match(body, at).end() + 1  # type: ignore[union-attr]  # it matches anything
        mark = body[at - 1 : at]
        if mark == b'"':
            at = string_end(body, at)
        elif mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                return at
        else:
            raise NotAnObject("a list or an object does not end")
