"""PURE. One request as its engine sees it."""

from dataclasses import dataclass, field
from enum import StrEnum


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FROZEN = "frozen"
    SHELL = "shell"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request as its engine sees it. Written by EngineModel alone; `keys` names its complete blocks for the prefix cache and may be
    extended by its maker. Lower `priority` first, then order of arrival."""

    prompt_tokens: int
    max_output_tokens: int
    priority: int = 0
    tier: str = "normal"
    keys: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    rank: tuple[int, int] = (0, 0)
    queued_s: float = 0.0
    preemptions: int = 0
    thaws_to: RequestState = RequestState.RUNNING

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is computed, and there is one."""
        return self.output_tokens > 0 and self.computed_tokens == self.tokens - 1
