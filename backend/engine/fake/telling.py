"""PURE. How an answer is told, whichever API asks: what each of them makes of the outputs, and what they have in common."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from migration.messages import TokenStep

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine output adds to a choice."""

    index: int
    text: str
    step: TokenStep | None
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """A choice as it grows."""

    text: str = ""
    tokens: int = 0
    steps: list[tuple[TokenStep, int]] = field(default_factory=list)
    """With the length of the text before each."""
    finish_reason: str | None = None
    stop_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Grow by what came."""
        if delta.step is not None:
            self.tokens += 1
            self.steps.append((delta.step, len(self.text)))
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Telling(Protocol):
    """One answer in the words of one API. What streams comes in pieces, each sent by itself."""

    def early(self) -> Sequence[bytes]:
        """What a stream says before there is any token."""

    def opening(self, choices: int) -> Sequence[bytes]:
        """What it says with the first one."""

    def tell(self, delta: Delta, choice: Choice) -> Sequence[bytes]:
        """One output; `choice` has grown by it already."""

    def closing(self, choices: Sequence[Choice]) -> Sequence[bytes]:
        """What comes after the last one."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer to a request that does not stream."""


def encode(value: Json) -> bytes:
    """JSON as vLLM writes it: compact, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def named_event(value: Json) -> bytes:
    """An SSE event that is named by its own type."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + encode(value) + b"\n\n"
