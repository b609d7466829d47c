"""PURE. Redis's wire format (RESP 2): commands to bytes, and answers out of the bytes as they come."""

from dataclasses import dataclass
from typing import TypeAlias

_STATUS, _REFUSAL, _NUMBER, _TEXT, _LIST = b"+-:$*"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Redis answered with an error."""

    text: str


Reply: TypeAlias = "int | str | Refusal | list[Reply] | None"


def pack(*words: str | int) -> bytes:
    """One command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(text), text))
    return b"".join(parts)


class ReplyReader:
    """Holds back, at most, one answer that is not complete yet."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """The answers that these bytes complete. Raises ValueError: this is not RESP 2."""
        if self._held:
            self._held += data
            data = bytes(self._held)
        replies: list[Reply] = []
        begin = 0
        while begin < len(data) and (found := _read(data, begin)) is not None:
            reply, begin = found
            replies.append(reply)
        self._held = bytearray(data[begin:])
        return replies


def _read(data: bytes, at: int) -> tuple[Reply, int] | None:
    """The answer that begins at `at`, and where it ends; None if it is not all there."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return None
    kind, line, at = data[at], data[at + 1 : line_end], line_end + 2
    if kind == _TEXT:
        end = at + int(line)
        if end < at:
            return None, at
        return (data[at:end].decode(), end + 2) if len(data) >= end + 2 else None
    if kind == _NUMBER:
        return int(line), at
    if kind == _LIST:
        return _read_list(data, at, int(line))
    if kind == _STATUS:
        return line.decode(), at
    if kind == _REFUSAL:
        return Refusal(line.decode(errors="replace")), at
    raise ValueError(f"not an answer of redis: {data[at - 2 : at + 20]!r}")


def _read_list(data: bytes, at: int, length: int) -> tuple[Reply, int] | None:
    if length < 0:
        return None, at
    items: list[Reply] = []
    for _ in range(length):
        found = _read(data, at)
        if found is None:
            return None
        item, at = found
        items.append(item)
    return items, at
