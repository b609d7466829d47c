"""FakeEngine: the modelled engine as a llumlet sees it. Gives requests away, takes them in, serves OpenAI's routes."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from starlette.types import ASGIApp

from backend.engine.fake.chain import TokenChain
from backend.engine.fake.channel import SocketChannels
from backend.engine.fake.generation import Generation, Output
from backend.engine.fake.memory import KVMemory
from backend.engine.fake.openai_app import MOVABLE_PATHS, RESPONSES, build_openai_app
from backend.engine.fake.runner import Runner
from backend.engine.fake.sampling import Sampling, finish_reason
from backend.engine.fake.settings import FakeSettings
from backend.engine.fake.stay import Stay
from backend.engine.flight import USUAL_RANK, Flight, current_flight
from backend.engine.model import EngineModel, NoRoom
from backend.engine.request import EngineRequest, RequestState
from backend.registry.instance import LoadReport
from migration.errors import ChannelError, Refused, RequestEnded, Unmovable
from migration.leg import InstanceId, Leg
from migration.messages import ChannelOffer, KVLayout, TokenStep
from migration.ports import Frozen, Phase, Progress


class FakeEngine:
    """Implements backend.engine.base.Engine. `runner` and `memory` are open to tests that look inside."""

    def __init__(self, settings: FakeSettings, host: str) -> None:
        self.settings = settings
        self._shape = settings.shape()
        self.memory = KVMemory(settings.capacity_blocks, settings.block_tokens, settings.kv_bytes_per_block)
        self.runner = Runner(EngineModel(self._shape), self.memory, monotonic)
        self._channels = SocketChannels(
            host, advertised=settings.channel_host, bytes_per_s=settings.copy_bytes_per_s, timeout_s=settings.channel_timeout_s
        )
        self._stays: dict[Leg, Stay] = {}
        self._numbers = itertools.count()
        self._openai_app = build_openai_app(self)

    # -- Engine

    @property
    def openai_app(self) -> ASGIApp:
        return self._openai_app

    @property
    def movable_paths(self) -> frozenset[str]:
        return MOVABLE_PATHS

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._channels.open(), asyncio.TaskGroup() as group:
            task = group.create_task(self.runner.run())
            try:
                yield
            finally:
                task.cancel()
                self.runner.end_all()

    @asynccontextmanager
    async def open_flight(self, flight: Flight) -> AsyncIterator[None]:
        stay = self._stays[flight.leg] = Stay(flight)
        flight.names_are_drawn = flight.http.path.partition("?")[0] == RESPONSES
        try:
            yield
        finally:
            if self._stays.get(flight.leg) is stay:
                del self._stays[flight.leg]
            for generation in stay.generations:
                self.runner.end(generation)
            flight.end()
            stay.over.set()

    def flight(self, leg: Leg) -> Flight | None:
        stay = self._stays.get(leg)
        return stay.flight if stay else None

    def load(self) -> LoadReport:
        return self.runner.report(models=(self.settings.model,), engine="fake")

    def watch_load(self, changed: Callable[[bool], None]) -> None:
        self.runner.watch(changed)

    # -- what the OpenAI server asks of it

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling) -> AsyncGenerator[Output, None]:
        """The outputs for one prompt, a token at a time, the known ones first if the request comes from elsewhere; the last one has a
        finish reason. Closing it aborts. Raises NoRoom('too_long')."""
        flight = current_flight.get()
        generation = self._generation(prompt, sampling, flight)
        try:
            if flight is not None and flight.replay is not None:
                generation.hold_notes()
                self.runner.submit_shell(generation)
                flight.shell.set()
                async for batch in flight.replay.batches():
                    flight.note_tokens(list(batch))
                    for step in batch:
                        flight.note_yielded(1)
                        ends = finish_reason(sampling, step.token, flight.yielded)
                        yield Output(step, ends)
                        if ends is not None:
                            return
                generation.release_notes()
            else:
                self.runner.submit(generation)
            output = None
            while output is None or output.finish_reason is None:
                output = await generation.take()
                if flight is not None and output.step is not None:
                    flight.note_yielded(1)
                yield output
        finally:
            self.runner.end(generation)

    def _generation(self, prompt: tuple[int, ...], sampling: Sampling, flight: Flight | None) -> Generation:
        tier, rank = (flight.tier, flight.rank) if flight else ("normal", USUAL_RANK)
        request = EngineRequest(len(prompt), sampling.max_tokens, rank, tier)
        chain = TokenChain(self._shape.block_tokens, request.keys if self.settings.prefix_cache else [])
        generation = Generation(f"fake-{next(self._numbers)}-{secrets.token_hex(4)}", prompt, sampling, request, chain)
        if flight is not None:
            generation.flight = flight
            flight.engine_requests.append(generation.id)
            flight.prompt_tokens = len(prompt)
            stay = self._stays.get(flight.leg)
            if stay is not None:
                stay.add(generation)
        return generation

    # -- SourceEngine

    def layout(self) -> KVLayout:
        settings = self.settings
        return KVLayout(
            model=settings.model,
            dtype="bytes",
            block_tokens=settings.block_tokens,
            block_bytes=settings.kv_bytes_per_block,
            layers=1,
            ranks=1,
            shape=f"{settings.block_tokens}x{settings.kv_bytes_per_block // settings.block_tokens}",
            version="fake 1",
        )

    def check_movable(self, leg: Leg) -> None:
        known = self._stays.get(leg)
        if known is not None and not known.generations and not known.over.is_set():
            raise Unmovable(reason="starting")
        stay = self._stay(leg)
        if stay.flight.unmovable is not None:
            raise Unmovable(reason=stay.flight.unmovable)
        if len(stay.generations) > 1:
            raise Unmovable(reason="several_requests")
        if stay.generation.request.state is RequestState.SHELL:
            raise Unmovable(reason="arriving")

    async def look(self, leg: Leg) -> Progress:
        generation = self._stay(leg).generation
        request = generation.request
        if not request.blocks or (request.output_tokens and not request.decoding):
            phase = Phase.WAITING
        else:
            phase = Phase.DECODE if request.output_tokens else Phase.PREFILL
        settled_tokens = request.computed_tokens if phase is Phase.DECODE else 0
        return Progress(phase, request.prompt_tokens, len(generation.steps), settled_tokens)

    def steps(self, leg: Leg) -> tuple[TokenStep, ...]:
        return tuple(self._stay(leg).generation.steps)

    async def wait_first_token(self, leg: Leg) -> None:
        generation = self._stay(leg).generation
        await generation.first_token.wait()
        if generation.ended.is_set():
            raise RequestEnded

    async def offer_channel(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        return self._channels.offer(peer, fresh=fresh)

    async def send_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
        if first_block == end_block:  # called off, whether the request is still here or not
            await self._channels.send_nothing(peer, transfer)
            return 0
        try:
            blocks = self.runner.model.pin(self._stay(leg).generation.request, first_block, end_block)
        except (ValueError, RequestEnded) as error:
            await self._channels.send_nothing(peer, transfer)
            raise ChannelError(f"the request of {leg} does not hold its blocks any more", reason="blocks_gone") from error
        try:
            return await self._channels.send(peer, transfer, first_block, [self.memory.read(block) for block in blocks])
        finally:
            self._unpin(blocks)

    async def freeze(self, leg: Leg) -> Frozen:
        generation = self._stay(leg).generation

        def take_out() -> None:
            if generation.ended.is_set():
                raise RequestEnded
            if generation.request.state is RequestState.SHELL:
                raise Unmovable(reason="arriving")
            if generation.request.state is not RequestState.FROZEN:
                self.runner.model.freeze(generation.request)
                self.runner.changed(urgent=True)

        await self.runner.at_boundary(take_out)
        request = generation.request
        computed_tokens = request.computed_tokens if request.decoding else 0
        return Frozen(tuple(generation.steps), request.prompt_tokens, computed_tokens, (generation.random.dump(),))

    async def thaw(self, leg: Leg) -> None:
        stay = self._stays.get(leg)
        if stay is not None and stay.generations and stay.generation.request.state is RequestState.FROZEN:
            self.runner.model.thaw(stay.generation.request)
            self.runner.changed(urgent=True)

    async def wait_ended(self, leg: Leg) -> None:
        stay = self._stays.get(leg)
        if stay is not None:
            await stay.over.wait()

    # -- DestinationEngine

    async def accept_channel(self, peer: InstanceId, offer: ChannelOffer) -> None:
        await self._channels.accept(peer, offer)

    async def reserve(self, leg: Leg, steps: Sequence[TokenStep], room_tokens: int) -> int:
        generation = self._shell(leg)
        generation.restore(steps)
        generation.chain()
        try:
            cached_tokens = self.runner.model.reserve(generation.request, len(steps), room_tokens)
        except NoRoom as error:
            raise Refused(reason=error.reason) from error
        self.runner.changed(urgent=False)
        return cached_tokens

    async def receive_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> None:
        stay, request = self._stay(leg), self._shell(leg).request
        try:
            blocks = self.runner.model.pin(request, first_block, end_block)
        except ValueError as error:
            raise ChannelError(f"no memory is reserved for blocks {first_block} to {end_block}") from error

        def place(block: int, data: bytes) -> None:
            self.memory.write(blocks[block - first_block], data)

        try:
            with stay.receiving():
                await self._channels.receive(peer, transfer, first_block, end_block, self.memory.block_bytes, place)
        finally:
            self._unpin(blocks)

    async def adopt(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        generation = self._shell(leg)
        generation.restore(steps)
        try:
            for state in sampler:
                generation.random.restore(state)
        except ValueError as error:
            raise Refused(str(error), reason="state") from error
        if not sampler and generation.sampling.temperature > 0:
            generation.random.skip(len(steps))  # one draw a token

    async def activate(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int) -> None:
        try:
            self.runner.activate(self._shell(leg), computed_tokens)
        except ValueError as error:
            raise Refused(str(error), reason="state") from error

    async def discard(self, leg: Leg) -> None:
        stay = self._stays.get(leg)
        if stay is None:
            return
        for generation in stay.generations:
            self.runner.end(generation)
        await stay.quiet.wait()

    # -- inside

    def _stay(self, leg: Leg) -> Stay:
        stay = self._stays.get(leg)
        if stay is None or not stay.generations or stay.generations[0].ended.is_set():
            raise RequestEnded(f"{leg} is not here")
        return stay

    def _shell(self, leg: Leg) -> Generation:
        generation = self._stay(leg).generation
        if generation.request.state is not RequestState.SHELL:
            raise Refused(f"{leg} runs here already", reason="not_a_shell")
        return generation

    def _unpin(self, blocks: Sequence[int]) -> None:
        self.runner.model.unpin(blocks)
        self.runner.changed(urgent=True)


def build_fake_engine(settings: FakeSettings, host: str) -> FakeEngine:
    """An engine that offers its KV channel on `host`."""
    return FakeEngine(settings, host)
