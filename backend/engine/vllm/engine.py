"""vLLM as an Engine: the ports of migration and of the llumlet, on the scheduler link, the KV agents and the engine client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp
from vllm import envs
from vllm.sampling_params import SamplingType
from vllm.v1.engine.exceptions import EngineDeadError

from backend.engine.flight import Flight
from backend.engine.vllm import agent_wire, orders
from backend.engine.vllm.agents import Agents
from backend.engine.vllm.client import MigratingLLM
from backend.engine.vllm.scheduler_link import SchedulerLink
from backend.registry.instance import InstanceState, LoadReport, StepCost, TierLoad
from migration.errors import MigrationError, Refused, RequestEnded, Unmovable
from migration.leg import InstanceId, Leg
from migration.messages import ChannelOffer, KVLayout, TokenStep
from migration.ports import Frozen, Phase, Progress

WATCH_INTERVAL_S = 0.5
RESPONSES = "/v1/responses"
MOVABLE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES})


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """`order_s` bounds an order to the scheduler, which is served between two steps (a long prefill delays it); `copy_s` a transfer."""

    order_s: float = 30.0
    channel_s: float = 10.0
    copy_s: float = 60.0


@dataclass(eq=False, slots=True)
class _Hold:
    """What this side knows of the engine's memory for one leg."""

    blocks: list[int]
    preemptions: int = 0


class VllmEngine:
    """One vLLM engine. Use inside `running()`."""

    def __init__(
        self, llm: MigratingLLM, app: FastAPI, link: SchedulerLink, agents: Agents, layout: KVLayout, timeouts: EngineTimeouts
    ) -> None:
        self._llm, self._app, self._link, self._agents = llm, app, link, agents
        self._layout, self._timeouts = layout, timeouts
        self._unmovable = why_engine_cannot_move(llm) or next((rank.unmovable for rank in agents.ranks if rank.unmovable), None)
        self._flights: dict[Leg, Flight] = {}
        self._holds: dict[Leg, _Hold] = {}
        self._load: orders.Load | None = None
        self._watchers: list[Callable[[bool], None]] = []

    # ---- Engine -----------------------------------------------------------------------------------------------------------

    @property
    def openai_app(self) -> ASGIApp:
        return self._app

    @property
    def movable_paths(self) -> frozenset[str]:
        return MOVABLE_PATHS

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._app.router.lifespan_context(self._app),
            self._link.open(self._hear),
            asyncio.TaskGroup() as group,
        ):
            watching = group.create_task(self._watch_engine())
            yield
            watching.cancel()

    async def _watch_engine(self) -> None:
        """Raise once vLLM's engine process has died: a backend without an engine must not look alive."""
        while not self._llm.errored:  # noqa: ASYNC110  # vLLM offers no event for it
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise EngineDeadError

    @asynccontextmanager
    async def open_flight(self, flight: Flight) -> AsyncIterator[None]:
        self._flights[flight.leg] = flight
        if flight.http.path.partition("?")[0] == RESPONSES:
            flight.names_are_drawn = not (envs.VLLM_ENABLE_RESPONSES_API_STORE and asks_to_store(flight.http.body))
            flight.unmovable = None if flight.names_are_drawn else "stored"
        try:
            yield
        finally:
            self._flights.pop(flight.leg, None)
            self._holds.pop(flight.leg, None)
            left = [request for request in flight.engine_requests if self._llm.noting.has_request(request)]
            for request in left:
                await self._llm.abort(request, internal=True)
            for request in flight.engine_requests:
                self._llm.noting.forget(request)

    def flight(self, leg: Leg) -> Flight | None:
        return self._flights.get(leg)

    def load(self) -> LoadReport:
        load = self._load
        config = self._llm.vllm_config
        served = config.model_config.served_model_name
        return LoadReport(
            instance=InstanceId(""),
            incarnation="",
            sequence=0,
            url="",
            state=InstanceState.READY if load else InstanceState.STARTING,
            models=(served,) if isinstance(served, str) else tuple(served or ()),
            engine=self._layout.version,
            capacity_tokens=load.capacity_tokens if load else 0,
            free_tokens=load.free_tokens if load else 0,
            block_tokens=load.block_tokens if load else self._layout.block_tokens,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            waiting_tokens=load.waiting_tokens if load else 0,
            head_tokens=load.head_tokens if load else 0,
            head_tier=load.head_tier if load else "",
            oldest_waiting_s=load.oldest_waiting_s if load else 0.0,
            tiers=tuple((tier.tier, TierLoad(tier.running, tier.tokens)) for tier in load.tiers) if load else (),
            preemptions=load.preemptions if load else 0,
            migrations_in=0,
            migrations_out=0,
            max_batch=config.scheduler_config.max_num_seqs,
            max_model_tokens=config.model_config.max_model_len,
            cost=StepCost(**msgspec.structs.asdict(load.cost)) if load else StepCost(),
        )

    def watch_load(self, changed: Callable[[bool], None]) -> None:
        self._watchers.append(changed)

    def _hear(self, news: orders.News) -> None:
        if isinstance(news, orders.Load):
            self._load = news
            for changed in self._watchers:
                changed(news.urgent)
            return
        flight = self._llm.noting.flights.get(news.request)
        if flight is not None:
            flight.shell.set()

    # ---- SourceEngine -----------------------------------------------------------------------------------------------------

    def layout(self) -> KVLayout:
        return self._layout

    def check_movable(self, leg: Leg) -> None:
        flight = self._flight(leg)
        reason = self._unmovable or flight.unmovable
        if reason is not None:
            raise Unmovable(f"this request cannot be moved: {reason}", reason=reason)

    async def look(self, leg: Leg) -> Progress:
        standing = await self._link.ask(lambda order: orders.Look(order, self._request(leg)), orders.Standing)
        self._note_blocks(leg, standing)
        return _progress(standing)

    def steps(self, leg: Leg) -> tuple[TokenStep, ...]:
        return tuple(self._flight(leg).history)

    async def wait_first_token(self, leg: Leg) -> None:
        flight = self._flight(leg)
        await flight.wait_history(1)
        if flight.ended.is_set():
            raise RequestEnded

    async def offer_channel(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        return await self._agents.offer(peer, fresh=fresh, timeout_s=self._timeouts.channel_s)

    async def send_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
        hold = self._holds.get(leg)
        blocks = hold.blocks[first_block:end_block] if hold is not None else []
        if len(blocks) != end_block - first_block:
            blocks = []  # gone meanwhile: tell the receiver that nothing comes
        return await self._agents.send(peer, transfer, blocks, self._timeouts.copy_s)

    async def freeze(self, leg: Leg) -> Frozen:
        request = self._request(leg)
        flight = self._flight(leg)
        standing = await self._link.ask(lambda order: orders.Freeze(order, request), orders.Standing)
        self._note_blocks(leg, standing)
        async with asyncio.timeout(self._timeouts.order_s):
            await flight.wait_history(standing.output_tokens)
        steps = tuple(flight.history)
        if flight.ended.is_set() or not self._llm.noting.has_request(request):
            raise RequestEnded  # vLLM's front end found a stop string in the last tokens
        if [step.token for step in steps] != standing.output:
            raise MigrationError("the front end and the scheduler disagree about the output", reason="history")
        return Frozen(
            steps=steps,
            prompt_tokens=standing.prompt_tokens,
            computed_tokens=standing.settled_tokens,
            sampler=await self._sampler(request),
        )

    async def thaw(self, leg: Leg) -> None:
        flight = self._flights.get(leg)
        if flight is not None and flight.engine_requests:
            request = flight.engine_requests[0]
            await self._link.ask(lambda order: orders.Thaw(order, request), orders.Done)

    async def wait_ended(self, leg: Leg) -> None:
        flight = self._flights.get(leg)
        if flight is not None:
            await flight.ended.wait()

    # ---- DestinationEngine ------------------------------------------------------------------------------------------------

    async def accept_channel(self, peer: InstanceId, offer: ChannelOffer) -> None:
        await self._agents.accept(peer, offer, self._timeouts.channel_s)

    async def reserve(self, leg: Leg, steps: Sequence[TokenStep], room_tokens: int) -> int:
        if self._unmovable is not None:
            raise Refused(reason=self._unmovable)
        request = self._request(leg)
        output = [step.token for step in steps]
        held = await self._link.ask(lambda order: orders.Hold(order, request, output, room_tokens), orders.Held)
        self._holds[leg] = _Hold(held.blocks)
        return held.cached_tokens

    async def receive_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> None:
        hold = self._holds.get(leg)
        blocks = hold.blocks[first_block:end_block] if hold is not None else []
        if len(blocks) != end_block - first_block:
            raise Refused("no room is reserved for these blocks", reason="not_reserved")
        await self._agents.receive(peer, transfer, blocks, self._timeouts.copy_s)

    async def adopt(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        request = self._request(leg)
        if self._unmovable is not None:
            raise Refused(reason=self._unmovable)
        if steps:
            await self._adopt(request, [step.token for step in steps], computed_tokens, sampler)

    async def activate(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int) -> None:
        request = self._request(leg)
        output = [step.token for step in steps]
        if not self._llm.noting.has_request(request):
            raise RequestEnded
        await self._link.ask(lambda order: orders.Activate(order, request, output, computed_tokens), orders.Done)
        self._holds.pop(leg, None)  # from here on it is the scheduler that knows

    async def discard(self, leg: Leg) -> None:
        flight = self._flights.get(leg)
        self._holds.pop(leg, None)
        for request in flight.engine_requests if flight is not None else ():
            await self._llm.abort(request, internal=True)

    # ---- parts ------------------------------------------------------------------------------------------------------------

    def _flight(self, leg: Leg) -> Flight:
        flight = self._flights.get(leg)
        if flight is None or flight.ended.is_set():
            raise RequestEnded
        return flight

    def _request(self, leg: Leg) -> str:
        """The engine's own id of the request."""
        flight = self._flight(leg)
        if not flight.engine_requests:
            raise MigrationError("the request has not reached the engine yet", reason="not_started")
        return flight.engine_requests[0]

    def _note_blocks(self, leg: Leg, standing: orders.Standing) -> None:
        """Remember the block ids; blocks copied before a preemption may have been written by others since."""
        known = self._holds.get(leg)
        if known is not None and known.preemptions != standing.preemptions:
            del self._holds[leg]
            raise MigrationError("the request was preempted while it was copied", reason="preempted")
        self._holds[leg] = _Hold(standing.blocks, standing.preemptions)

    async def _sampler(self, request: str) -> tuple[bytes, ...]:
        known = self._llm.noting.engine_requests.get(request)
        params = known.sampling_params if known is not None else None
        if params is None or params.sampling_type != SamplingType.RANDOM_SEED:
            return ()
        return await self._agents.export_sampler(request, self._timeouts.channel_s)

    async def _adopt(self, request: str, output: list[int], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        known = self._llm.noting.engine_requests.get(request)
        if known is None or known.sampling_params is None:
            raise RequestEnded
        ranks = self._agents.ranks
        states = tuple(sampler) if len(sampler) == len(ranks) else (b"",) * len(ranks)
        adoption = agent_wire.Adopt(
            request=request,
            prompt=list(known.prompt_token_ids or ()),
            output=output,
            computed_tokens=computed_tokens,
            sampling_params=msgspec.msgpack.encode(known.sampling_params),
            sampler=b"",
            draws=0 if sampler else len(output),
        )
        orders_by_rank = [msgspec.structs.replace(adoption, sampler=state) for state in states]
        await self._agents.adopt(orders_by_rank, self._timeouts.channel_s)


def asks_to_store(body: bytes) -> bool:
    """Whether the answer is to be kept, which is so unless the body says otherwise. What cannot be read is to be."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return True
    return not isinstance(fields, dict) or fields.get("store", True) not in (False, None)


def _progress(standing: orders.Standing) -> Progress:
    return Progress(
        phase=Phase(standing.phase),
        prompt_tokens=standing.prompt_tokens,
        output_tokens=standing.output_tokens,
        settled_tokens=standing.settled_tokens,
    )


def why_engine_cannot_move(llm: MigratingLLM) -> str | None:
    """What this engine's configuration has that cannot be carried exactly, or None. Its requests are served all the same."""
    config = llm.vllm_config
    parallel = config.parallel_config
    reasons = {
        "pipeline_parallel": parallel.pipeline_parallel_size > 1,
        "data_parallel": parallel.data_parallel_size > 1,
        "context_parallel": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "speculation": config.speculative_config is not None,
        "encoder_decoder": config.model_config.is_encoder_decoder,
        "mrope": config.model_config.uses_mrope,
        "kv_connector": config.kv_transfer_config is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
