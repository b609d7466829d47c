"""One generation of the fake engine: its tokens so far, its place in the modelled engine, and the outputs nobody has taken yet."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.engine.fake.chain import TokenChain
from backend.engine.fake.sampling import RandomState, Sampling
from backend.engine.flight import Flight
from backend.engine.request import EngineRequest
from migration.messages import TokenStep


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine hands out at a time: one token, or none, and at the end the reason: 'stop', 'length' or 'abort'."""

    step: TokenStep | None
    finish_reason: str | None = None


class Generation:
    """Written by the runner; its outputs are read by whoever serves the request."""

    def __init__(self, name: str, prompt: tuple[int, ...], sampling: Sampling, request: EngineRequest, chain: TokenChain) -> None:
        self.id = name
        self.prompt = prompt
        self.sampling = sampling
        self.request = request
        self.flight: Flight | None = None
        self.random = RandomState(sampling.seed)
        self.steps: list[TokenStep] = []
        self.ended = asyncio.Event()
        self.first_token = asyncio.Event()
        """Set with the first token, and when there will be none."""
        self.on_end: Callable[[], None] | None = None
        self._chain = chain
        self._noting = True
        self._outputs: deque[Output] = deque()
        self._arrived = asyncio.Event()

    def token(self, position: int) -> int:
        """The token at that position of prompt and output."""
        prompt_tokens = len(self.prompt)
        return self.prompt[position] if position < prompt_tokens else self.steps[position - prompt_tokens].token

    def restore(self, steps: Sequence[TokenStep]) -> None:
        """The output so far, generated elsewhere; at least as long as the one known here."""
        self.steps = list(steps)
        if steps:
            self.first_token.set()

    def chain(self) -> TokenChain:
        """The digests of all tokens of prompt and output; up to date."""
        for position in range(self._chain.tokens, len(self.prompt) + len(self.steps)):
            self._chain.push(self.token(position))
        return self._chain

    def put(self, output: Output) -> None:
        """The engine's next output."""
        if output.step is not None:
            self.steps.append(output.step)
            self.first_token.set()
            if self._noting and self.flight is not None:
                self.flight.note_tokens([output.step])
        if output.finish_reason is not None:
            self.ended.set()
            self.first_token.set()
            if self.on_end is not None:
                self.on_end()
        self._outputs.append(output)
        self._arrived.set()

    def hold_notes(self) -> None:
        """The flight is still to be told of tokens from before it came here: those from this engine wait."""
        self._noting = False

    def release_notes(self) -> None:
        """Tell the flight of the tokens that came meanwhile, and from now on of each as it comes."""
        self._noting = True
        waiting = [output.step for output in self._outputs if output.step is not None]
        if self.flight is not None and waiting:
            self.flight.note_tokens(waiting)

    async def take(self) -> Output:
        """The next output nobody has taken; waits for the engine."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft()
