"""One HTTP request as it is being served by this instance: the thread between the HTTP layer, the engine client and migration.

The llumlet opens a Flight for each request the gateway sends, and makes it the `current_flight` of the task that runs the OpenAI
server's own handler. The engine client, called somewhere below, finds it there, notes the tokens, and replays known ones.
"""

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from migration.leg import Leg
from migration.messages import HttpRequest, TokenStep


class Replay:
    """The output tokens an arriving request already has. Fed by migration, read by the engine client, in order, exactly once.

    `extend` adds tokens; `finish` says that the engine continues from here. `batches` yields what there is and waits for more
    until `finish` (or raises CancelledError with its task).
    """

    def __init__(self) -> None:
        self._steps: list[TokenStep] = []
        self._finished = False
        self._changed = asyncio.Event()

    @property
    def steps(self) -> tuple[TokenStep, ...]:
        return tuple(self._steps)

    @property
    def finished(self) -> bool:
        """Whether the engine goes on from here: the request runs at this instance."""
        return self._finished

    def extend(self, steps: tuple[TokenStep, ...]) -> None:
        self._steps.extend(steps)
        self._changed.set()

    def finish(self) -> None:
        self._finished = True
        self._changed.set()

    async def batches(self) -> AsyncIterator[tuple[TokenStep, ...]]:
        taken = 0
        while True:
            if taken < len(self._steps):
                batch = tuple(self._steps[taken:])
                taken += len(batch)
                yield batch
            elif self._finished:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


USUAL_RANK = 1
"""Of requests whose rank nobody has said: that of normal ones."""


@dataclass(eq=False, slots=True)
class Flight:
    """Mutable, owned by one task of the llumlet; identity, not value, is what counts.

    `history` grows when the ENGINE's outputs arrive; `yielded` counts tokens handed to the serving code, which is what an event's
    cursor means. For a request that streams nothing, the two are the same to an observer.
    """

    leg: Leg
    http: HttpRequest
    tier: str = "normal"
    rank: int = USUAL_RANK
    """Orders the engine's queue: lower first."""
    replay: Replay | None = None
    """Set for a request that arrives from elsewhere."""
    history: list[TokenStep] = field(default_factory=list)
    yielded: int = 0
    engine_requests: list[str] = field(default_factory=list)
    """Ids of the engine's own requests made for this HTTP request. More than one means it cannot move."""
    unmovable: str | None = None
    """Why this request cannot be moved: a snake_case word, or None."""
    failed: bool = False
    """The engine, not the request, is at fault: what its server says from now on is not for the client."""
    names_are_drawn: bool = False
    """The answer's parts have random names that its stream tells more than once, and nobody else will ask for them by these."""
    prompt_tokens: int = 0
    prefill: tuple[int, int] | None = None
    """Of the prompt's tokens, how many the engine that computed it found in its prefix cache, and how many it wrote there."""
    created: int | None = None
    shell: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine holds an arriving request as a shell."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the HTTP exchange here is over, whatever the reason."""
    owned_since_s: float = float("-inf")
    """When a request that came from elsewhere became this instance's own, by the llumlet's clock."""
    tried_epoch: int = 0
    """The highest epoch that a move away from here was tried with; an epoch is never used twice."""
    _noted: asyncio.Event = field(default_factory=asyncio.Event)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def note_tokens(self, steps: list[TokenStep]) -> None:
        """The engine gave these tokens (called by the engine client as they arrive)."""
        self.history.extend(steps)
        self._wake()

    def note_yielded(self, tokens: int) -> None:
        """These many more tokens were handed to the serving code."""
        self.yielded += tokens
        self._noted.set()

    def end(self) -> None:
        """The HTTP exchange here is over. Whoever waits for this flight waits no more."""
        self.ended.set()
        self._wake()

    def next_leg(self) -> Leg:
        """The leg to try a move with: above this one, and above every one tried before."""
        self.tried_epoch = max(self.leg.epoch, self.tried_epoch) + 1
        return Leg(self.leg.request, self.tried_epoch)

    async def wait_noted(self) -> None:
        """Return when tokens were noted since the last call returned. For one waiting task."""
        await self._noted.wait()
        self._noted.clear()

    async def wait_history(self, tokens: int) -> None:
        """Return when the history holds at least that many tokens, or the flight has ended. For any number of waiting tasks."""
        while len(self.history) < tokens and not self.ended.is_set():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        self._noted.set()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


current_flight: ContextVar[Flight | None] = ContextVar("current_flight", default=None)
"""The flight of the HTTP request that this task serves; None for requests that did not come through a gateway."""
