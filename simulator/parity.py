"""PURE. A gateway's logged decisions made again here, and whether the same comes out."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.policy.decision import from_json, replay


class ParityError(Exception):
    """There is no decision to be read."""


@dataclass(slots=True)
class Parity:
    """`replayed` by kind; `differing` are the entries of which something else came out; `unread` those that cannot be read."""

    replayed: dict[str, int] = field(default_factory=dict)
    differing: list[Mapping[str, Any]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every one came out the same."""
        return bool(self.replayed) and not self.differing and not self.unread

    def to_json(self) -> dict[str, object]:
        return {"replayed": dict(sorted(self.replayed.items())), "differing": self.differing, "unread": self.unread}


def check(entries: Iterable[Mapping[str, Any]]) -> Parity:
    """Make each of them again."""
    parity = Parity()
    for entry in entries:
        try:
            decision = from_json(entry["decision"])
        except (KeyError, ValueError) as error:
            parity.unread.append(f"{entry.get('number', '?')}: {error}")
            continue
        parity.replayed[decision.kind] = parity.replayed.get(decision.kind, 0) + 1
        if replay(decision) != decision:
            parity.differing.append(entry)
    return parity


def entries_of(text: str) -> Sequence[Mapping[str, Any]]:
    """Of what `GET /admin/decisions` answers, or of a gateway's log, where a decision is the JSON object at the end of its line and
    other lines are something else. Raises ParityError if there is none."""
    found: list[Mapping[str, Any]]
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("decisions"), list):
        found = [entry for entry in whole["decisions"] if isinstance(entry, dict)]
    else:
        found = list(_of_lines(text.splitlines()))
    if not found:
        raise ParityError("no decision is in it; a gateway logs them with MIDSTREAM_LOG_DECISIONS=all")
    return found


def _of_lines(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        start = line.find("{")
        try:
            entry = json.loads(line[start:]) if start >= 0 else None
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("decision"), dict):
            yield entry
