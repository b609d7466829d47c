"""The modelled engine in real time: begins a step, waits as long as it takes, computes its KV bytes and tokens, hands them out."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from backend.engine.fake.generation import Generation, Output
from backend.engine.fake.memory import KVMemory
from backend.engine.fake.sampling import finish_reason, next_step
from backend.engine.model import EngineModel, Step
from backend.engine.request import EngineRequest, RequestState
from backend.engine.stepcost import StepCostFit
from backend.registry.instance import LoadReport
from migration.messages import TokenStep

T = TypeVar("T")


class Runner:
    """Owns the state of the engine. All methods but run() and at_boundary() act at once."""

    def __init__(self, model: EngineModel, memory: KVMemory, clock: Callable[[], float]) -> None:
        self.model = model
        self.memory = memory
        self._clock = clock
        self._generations: dict[EngineRequest, Generation] = {}
        self._boundary: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._watchers: list[Callable[[bool], None]] = []
        self._fit = StepCostFit()

    def watch(self, changed: Callable[[bool], None]) -> None:
        """Call `changed(urgent)` after every change of the load."""
        self._watchers.append(changed)

    def report(self, models: tuple[str, ...], engine: str) -> LoadReport:
        """The load now, of an engine of that name and version that serves these models."""
        return replace(self.model.report(self._clock()), models=models, engine=engine, cost=self._fit.cost())

    def generations(self) -> Sequence[Generation]:
        """All that have not ended."""
        return tuple(self._generations.values())

    # -- requests

    def submit(self, generation: Generation) -> None:
        """Queue it. Raises NoRoom('too_long')."""
        generation.chain()
        self.model.add(generation.request, self._clock())
        self._generations[generation.request] = generation
        self.changed(urgent=True)

    def submit_shell(self, generation: Generation) -> None:
        """Know it without running it. Raises NoRoom('too_long')."""
        self.model.add_shell(generation.request)
        self._generations[generation.request] = generation

    def activate(self, generation: Generation, computed_tokens: int) -> None:
        """Run a shell, or queue it if nothing is computed. Raises ValueError."""
        generation.chain()
        self.model.activate(generation.request, len(generation.steps), computed_tokens, self._clock())
        self.changed(urgent=True)

    def end(self, generation: Generation, reason: str = "abort") -> None:
        """Stop it, free its memory, say so to its reader. Idempotent."""
        if self._generations.pop(generation.request, None) is None:
            return
        self.model.end(generation.request)
        generation.put(Output(None, reason))
        self.changed(urgent=True)

    def end_all(self) -> None:
        """Stop everything."""
        for generation in self.generations():
            self.end(generation)

    def changed(self, *, urgent: bool) -> None:
        """The load is another one: look whether something can run now, and tell the watchers."""
        self._wake.set()
        for watcher in self._watchers:
            watcher(urgent)

    # -- steps

    async def at_boundary(self, action: Callable[[], T]) -> T:
        """Do this between two steps and answer its result; at once if none is running."""
        if not self.model.in_step:
            return action()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def perform() -> None:
            if done.done():
                return
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001  # not lost: it is raised where the action was asked for
                done.set_exception(error)

        self._boundary.append(perform)
        return await done

    async def run(self) -> None:
        """Steps, for ever."""
        while True:
            begun_s = self._clock()
            step = self.model.begin_step(begun_s)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            if step.admitted or step.preempted:
                self.changed(urgent=True)
            await asyncio.sleep(step.duration_s)
            freed = self._finish(step)
            self._fit.note(step.done, self._clock() - begun_s)
            actions, self._boundary = self._boundary, []
            for perform in actions:
                perform()
            self.changed(urgent=freed)
            await asyncio.sleep(0)

    def _finish(self, step: Step) -> bool:
        """Compute what the step was begun for and hand it out. True if a request ended."""
        produced = self._compute(step)
        self.model.end_step()
        for generation, token in produced:
            reason = finish_reason(generation.sampling, token.token, len(generation.steps) + 1)
            if reason is not None:
                del self._generations[generation.request]
                self.model.end(generation.request)
            generation.put(Output(token, reason))
        return any(generation.ended.is_set() for generation, _ in produced)

    def _compute(self, step: Step) -> Sequence[tuple[Generation, TokenStep]]:
        produced = []
        for request, tokens in step.work:
            if request.state is not RequestState.RUNNING:
                continue
            generation = self._generations[request]
            end = request.computed_tokens + tokens
            for position in range(request.computed_tokens, end):
                self.memory.compute(request.blocks, position, generation.token(position))
            if end == request.tokens:
                produced.append((generation, self._next(generation, end)))
        return produced

    def _next(self, generation: Generation, tokens: int) -> TokenStep:
        reading = generation.chain().digest() + self.memory.reading(generation.request.blocks, tokens)
        return next_step(generation.sampling, generation.random, reading, generation.token(tokens - 1), len(generation.steps))
