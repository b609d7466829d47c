"""PURE. A look at a large request body, whose cost hardly grows with the body: small members are parsed, the prompt is only measured."""

import json
import re
from collections.abc import Iterator

from gateway.json_members import Member, members, string_end

LARGE_BYTES = 256 * 1024
"""From here on a body is looked at in this way; below, parsing all of it is quicker."""

_SMALL_BYTES = 4096
_PROMPTS = ("messages", "prompt", "input", "system", "instructions")
_COLON = re.compile(rb"[ \t\r\n]*:")
_BYTES_PER_TOKEN = 4


def look(body: bytes) -> tuple[dict[str, object], int]:
    """The small members, and an estimate of the prompt's tokens. Raises ValueError if the body is not a JSON object."""
    known: dict[str, object] = {}
    tokens = 0
    for member in members(body):
        if member.name in _PROMPTS:
            tokens += _prompt_tokens(body, member)
        elif member.end - member.start <= _SMALL_BYTES:
            known[member.name] = json.loads(body[member.start : member.end])
    return known, tokens


def _prompt_tokens(body: bytes, member: Member) -> int:
    """Of a text by its bytes; of messages too, but for files in them; of token ids by the commas between them."""
    first = body[member.start : member.start + 1]
    if first == b'"':
        return -(-(member.end - member.start - 2) // _BYTES_PER_TOKEN)
    if first != b"[":
        return 0
    if member.name == "prompt" and body.find(b'"', member.start, member.end) < 0:
        return body.count(b",", member.start, member.end) + 1
    has_files = body.find(b"data", member.start, member.end) >= 0
    size = sum(_texts(body, member)) if has_files else member.end - member.start
    return -(-size // _BYTES_PER_TOKEN)


def _texts(body: bytes, member: Member) -> Iterator[int]:
    """The lengths of the strings within that are no names, and no files: those begin with `data:` or stand under that name."""
    at, name = member.start, b""
    while (quote := body.find(b'"', at, member.end)) >= 0:
        at = string_end(body, quote + 1)
        if _COLON.match(body, at):
            name = body[quote + 1 : at - 1]
        elif name != b"data" and not body.startswith(b"data:", quote + 1):
            yield at - quote - 2
