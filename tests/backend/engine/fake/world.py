"""Requests served on fake engines as a llumlet would serve them, and moved by calling the ports directly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from backend.engine.fake.engine import FakeEngine, build_fake_engine
from backend.engine.fake.generation import Generation
from backend.engine.fake.sampling import RandomState, Sampling
from backend.engine.fake.settings import FakeSettings
from backend.engine.fake.vocabulary import tokenize
from backend.engine.flight import Flight, Replay, current_flight
from backend.engine.request import EngineRequest
from migration.leg import InstanceId, Leg, RequestId
from migration.messages import HttpRequest, TokenStep

PROMPT = tokenize("Why do people say that one should not change horses in midstream? Answer at length, please.")


@dataclass(eq=False)
class Served:
    """One stay of a request on an engine. `tokens` are those its serving code has been given, known ones included."""

    engine: FakeEngine
    flight: Flight
    sampling: Sampling
    prompt: tuple[int, ...] = PROMPT
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    task: asyncio.Task[None] | None = None

    @property
    def leg(self) -> Leg:
        return self.flight.leg

    async def run(self) -> None:
        current_flight.set(self.flight)
        async with self.engine.open_flight(self.flight), aclosing(self.engine.generate(self.prompt, self.sampling)) as outputs:
            async for output in outputs:
                if output.step is not None:
                    self.tokens.append(output.step.token)
                self.finish_reason = output.finish_reason
                assert [step.token for step in self.flight.history[: self.flight.yielded]] == self.tokens

    def generation(self) -> Generation:
        return next(g for g in self.engine.runner.generations() if g.flight is self.flight)

    def generation_ended(self) -> bool:
        return all(g.flight is not self.flight for g in self.engine.runner.generations())

    async def leave(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])

    async def done(self) -> "Served":
        assert self.task is not None
        await self.task
        return self


class World:
    """Engines that run as long as the test, and what is served on them."""

    def __init__(self, stack: AsyncExitStack, group: asyncio.TaskGroup) -> None:
        self._stack = stack
        self._group = group
        self.engines: list[FakeEngine] = []
        self.served: list[Served] = []

    async def engine(self, **settings: object) -> FakeEngine:
        values: dict[str, object] = {"time_scale": 0, "max_model_tokens": 2048, "capacity_blocks": 256, "channel_timeout_s": 5}
        engine = build_fake_engine(FakeSettings.model_validate(values | settings), "127.0.0.1")
        await self._stack.enter_async_context(engine.running())
        self.engines.append(engine)
        return engine

    async def serve(
        self, engine: FakeEngine, sampling: Sampling, *, name: str = "r", epoch: int = 0, known: tuple[TokenStep, ...] | None = None
    ) -> Served:
        """`known`: it comes from elsewhere with these tokens; returns when the engine holds the shell."""
        flight = Flight(Leg(RequestId(name), epoch), HttpRequest("/v1/completions", (), b""))
        if known is not None:
            flight.replay = Replay()
            flight.replay.extend(known)
        served = Served(engine, flight, sampling)
        self.served.append(served)
        served.task = self._group.create_task(served.run())
        if known is not None:
            await flight.shell.wait()
        return served

    async def unmoved(self, sampling: Sampling) -> Served:
        return await (await self.serve(await self.engine(), sampling)).done()

    def assert_nothing_held(self) -> None:
        for engine in self.engines:
            model = engine.runner.model
            assert (model.running, model.waiting, model.pool.free_blocks) == ([], [], engine.settings.capacity_blocks)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that engines in this loop will bring about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """Entered and left by the test itself, so that engines and their tasks have one parent. Whatever is still served is cancelled."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        world = World(stack, group)
        try:
            yield world
        finally:
            for served in world.served:
                if served.task is not None:
                    served.task.cancel()


@dataclass(frozen=True)
class Hooks:
    """Where a test may interfere with a move."""

    before_freeze: Callable[[], Awaitable[None]] | None = None
    before_activate: Callable[[FakeEngine, EngineRequest], None] | None = None
    forget_sampler: bool = False
    carry_no_sampler: bool = False


async def move(world: World, here: Served, there: FakeEngine, *, stages: int = 2, hooks: Hooks = Hooks()) -> Served:
    """Move as migration.session does. `stages` = 0: recompute, 1: stop and copy, 2: one stage while it runs, then the rest."""
    source, sampling = here.engine, here.sampling
    names = InstanceId(f"i{world.engines.index(source)}"), InstanceId(f"i{world.engines.index(there)}")
    source.check_movable(here.leg)
    block_tokens = source.layout().block_tokens
    copied = 0
    if stages:
        await there.accept_channel(names[0], await source.offer_channel(names[1], fresh=False))
    known = source.steps(here.leg)
    arriving = await world.serve(there, sampling, epoch=here.leg.epoch + 1, known=known)
    leg = arriving.leg

    async def copy(transfer: int, first: int, end: int) -> None:
        if first == end:
            return  # an empty range would call the transfer off
        async with asyncio.TaskGroup() as group:
            group.create_task(there.receive_blocks(leg, names[0], transfer, first, end))
            group.create_task(source.send_blocks(here.leg, names[1], transfer, first, end))

    if stages:
        room_tokens = len(here.prompt) + sampling.max_tokens
        copied = await there.reserve(leg, known, room_tokens) // block_tokens
    if stages == 2:
        end = (await source.look(here.leg)).settled_tokens // block_tokens
        await copy(1, copied, max(copied, end))
        copied = max(copied, end)
    if hooks.before_freeze:
        await hooks.before_freeze()
    frozen = await source.freeze(here.leg)
    computed_tokens = frozen.computed_tokens if stages else 0
    if computed_tokens:
        await copy(2, copied, -(-computed_tokens // block_tokens))
    if hooks.before_activate:
        hooks.before_activate(there, arriving.generation().request)
    sampler = (RandomState(0).dump(),) if hooks.forget_sampler else () if hooks.carry_no_sampler else frozen.sampler
    await there.adopt(leg, frozen.steps, computed_tokens, sampler)
    await there.activate(leg, frozen.steps, computed_tokens)
    assert arriving.flight.replay is not None
    arriving.flight.replay.extend(frozen.steps[len(known) :])
    arriving.flight.replay.finish()
    await here.leave()
    return arriving
