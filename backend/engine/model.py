"""PURE. A continuous-batching engine as a state and a step: paged KV, a waiting queue, preemption by recomputation, step time.

A step is begun (what runs, how long it takes) and ended (what it produced). Used in virtual time by the simulator and in real time
by the fake engine. What the tokens are is no business of this module.

    add -> WAITING -> RUNNING -> ENDED          add_shell -> SHELL -> activate -> RUNNING | WAITING
              ^  preempt |                                     end -> ENDED
              +----------+      freeze: WAITING | RUNNING -> FROZEN -> thaw -> back where it was

`computed_tokens` tokens of `tokens` (prompt and output) have their KV in `blocks`; a request yields a token whenever a step ends with
the two equal, so a decoding request has tokens - computed_tokens == 1.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from backend.engine.blocks import BlockPool
from backend.engine.request import EngineRequest, RequestState
from backend.engine.shape import EngineShape, PrefillStyle
from backend.engine.stepcost import StepWork
from backend.registry.instance import InstanceState, LoadReport, StepCost, TierLoad
from migration.leg import InstanceId


class NoRoom(Exception):
    """The engine cannot hold this now; `reason` is 'no_memory', 'no_slot' or 'too_long'."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Step:
    """What runs between begin_step and end_step: each request with the number of tokens computed for it."""

    work: Sequence[tuple[EngineRequest, int]]
    done: StepWork
    duration_s: float
    admitted: Sequence[EngineRequest]
    preempted: Sequence[EngineRequest]


_rank = attrgetter("rank")
_NOBODY = InstanceId("")


class EngineModel:
    """The state of one engine. Time comes in as `now_s`; only its differences matter."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.capacity_blocks)
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.preemptions = 0
        self._held: dict[EngineRequest, None] = {}
        """Frozen requests and reserved shells: out of the batch, with a place in it kept for them."""
        self._arrivals = 0
        self._step: Step | None = None
        self._last_step_s = 0.0

    # -- requests coming and going

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Queue a new request. Raises NoRoom('too_long') if it could never fit."""
        self._enter(request)
        self._queue(request, now_s)

    def add_shell(self, request: EngineRequest) -> None:
        """Know a request that will come from elsewhere; it holds nothing yet. Raises NoRoom('too_long')."""
        self._enter(request)
        request.state = RequestState.SHELL

    def end(self, request: EngineRequest) -> None:
        """The request is over, whatever it was doing; its blocks are free. Idempotent."""
        if request.state is RequestState.ENDED:
            return
        self._leave(request)
        request.state = RequestState.ENDED
        self._drop_blocks(request)

    # -- out of the batch and back

    @property
    def in_step(self) -> bool:
        """Between begin_step and end_step."""
        return self._step is not None

    def freeze(self, request: EngineRequest) -> None:
        """Take a running request (at a step boundary) or a waiting one out; it keeps what it holds. Raises ValueError otherwise."""
        if request.state not in (RequestState.RUNNING, RequestState.WAITING):
            raise ValueError(f"a {request.state} request cannot be frozen")
        if request.state is RequestState.RUNNING and self.in_step:
            raise ValueError("a running request is frozen at a step boundary only")
        self._leave(request)
        request.thaws_to = request.state
        if request.state is RequestState.RUNNING:
            self._held[request] = None
        request.state = RequestState.FROZEN

    def thaw(self, request: EngineRequest) -> None:
        """Undo freeze: back into the batch, or into the queue at its old place."""
        if request.state is not RequestState.FROZEN:
            raise ValueError(f"a {request.state} request cannot be thawed")
        self._held.pop(request, None)
        request.state = request.thaws_to
        insort(self.running if request.state is RequestState.RUNNING else self.waiting, request, key=_rank)

    # -- coming from elsewhere

    def reserve(self, request: EngineRequest, output_tokens: int, room_tokens: int) -> int:
        """Hold memory for `room_tokens` of a shell, all or nothing; again to grow. Answers the tokens found in the prefix cache.

        Raises NoRoom('no_slot' | 'no_memory' | 'too_long'), ValueError if it is no shell.
        """
        if request.state is not RequestState.SHELL:
            raise ValueError(f"a {request.state} request cannot reserve")
        need = self.shape.blocks_for(room_tokens) - len(request.blocks)
        if need <= 0:
            return request.cached_tokens
        hits: list[int] = []
        if request not in self._held:
            if len(self.running) + len(self._held) >= self.shape.max_batch:
                raise NoRoom("no_slot")
            hits = self._hits(request, request.prompt_tokens + output_tokens)
        self.pool.hold(hits)
        if self.pool.free_blocks - (need - len(hits)) < self.shape.watermark_blocks:
            self.pool.release(hits)
            raise NoRoom("no_memory" if self.shape.blocks_for(room_tokens) <= self.shape.capacity_blocks else "too_long")
        request.blocks += hits + self.pool.take(max(0, need - len(hits)))
        if hits:
            request.cached_tokens = len(hits) * self.shape.block_tokens
        self._held[request] = None
        return request.cached_tokens

    def activate(self, request: EngineRequest, output_tokens: int, computed_tokens: int, now_s: float) -> None:
        """Make a shell run, its KV of `computed_tokens` in place; or queue it to be computed again, if that is 0.

        Raises ValueError unless it is a shell, and unless all tokens but the newest are computed in memory it holds.
        """
        if request.state is not RequestState.SHELL:
            raise ValueError(f"a {request.state} request cannot be activated")
        tokens = request.prompt_tokens + output_tokens
        if computed_tokens and (computed_tokens != tokens - 1 or self.shape.blocks_for(computed_tokens) > len(request.blocks)):
            raise ValueError(f"{computed_tokens} computed of {tokens} tokens in {len(request.blocks)} blocks")
        self._held.pop(request, None)
        request.output_tokens = output_tokens
        request.tokens = tokens
        if not computed_tokens:
            self._drop_blocks(request)
            self._queue(request, now_s)
            return
        request.computed_tokens = computed_tokens
        self._remember(request, 0)
        request.state = RequestState.RUNNING
        insort(self.running, request, key=_rank)

    def pin(self, request: EngineRequest, first_block: int, end_block: int) -> Sequence[int]:
        """Hold these blocks of the request's table on their own account, so that they keep their content while they are carried,
        even if the request is preempted or ends. Raises ValueError if it does not hold them."""
        if not 0 <= first_block <= end_block <= len(request.blocks):
            raise ValueError(f"blocks {first_block} to {end_block} of {len(request.blocks)}")
        blocks = tuple(request.blocks[first_block:end_block])
        self.pool.hold(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        """Give back what pin() held."""
        self.pool.release(blocks)

    # -- steps

    def begin_step(self, now_s: float) -> Step | None:
        """Choose what runs next, and hold memory for it. None if nothing can run."""
        if self._step is not None:
            raise ValueError("the last step has not ended")
        shape = self.shape
        preempted: list[EngineRequest] = []
        if shape.style is PrefillStyle.FIRST:
            admitted = self._admit(shape.max_prefill_tokens)
            work = admitted or self._schedule_running(shape.max_batch, preempted, now_s)
        else:
            work = self._schedule_running(shape.max_prefill_tokens, preempted, now_s)
            admitted = [] if preempted else self._admit(shape.max_prefill_tokens - sum(n for _, n in work))
            work = work + admitted
        if not work:
            return None
        done = _work_of(work)
        self._step = Step(work, done, self._duration_s(done), [r for r, _ in admitted], preempted)
        self._last_step_s = self._step.duration_s
        return self._step

    def end_step(self) -> list[EngineRequest]:
        """The step is over: answers the requests that got one more token, in rank order. Those at their maximum have ended.

        Requests that were ended while the step ran got nothing.
        """
        step, self._step = self._step, None
        if step is None:
            raise ValueError("no step was begun")
        block_tokens, running = self.shape.block_tokens, RequestState.RUNNING
        produced = []
        for request, n in step.work:
            if request.state is not running:
                continue
            before = request.computed_tokens
            request.computed_tokens = computed = before + n
            if request.keys and computed // block_tokens > before // block_tokens:
                self._remember(request, before // block_tokens)
            if computed == request.tokens:
                request.tokens += 1
                request.output_tokens += 1
                produced.append(request)
                if request.output_tokens >= request.max_output_tokens:
                    self.end(request)
        return produced

    def report(
        self,
        now_s: float,
        *,
        instance: InstanceId = _NOBODY,
        sequence: int = 0,
        state: InstanceState = InstanceState.READY,
        migrations_in: int = 0,
        migrations_out: int = 0,
    ) -> LoadReport:
        """The load as it is published. What a llumlet adds (identity, state, models, migrations) may be given, as far as it is known."""
        shape = self.shape
        tiers: dict[str, list[int]] = {}
        for request in self.running:
            load = tiers.setdefault(request.tier, [0, 0])
            load[0] += 1
            load[1] += request.tokens
        demand = [shape.blocks_for(request.tokens) * shape.block_tokens for request in self.waiting]
        cost = shape.cost
        return LoadReport(
            instance=instance,
            incarnation="",
            sequence=sequence,
            url="",
            state=state,
            models=(),
            engine="model",
            capacity_tokens=shape.capacity_blocks * shape.block_tokens,
            free_tokens=self.pool.free_blocks * shape.block_tokens,
            block_tokens=shape.block_tokens,
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=sum(demand),
            head_tokens=demand[0] if demand else 0,
            head_tier=self.waiting[0].tier if self.waiting else "",
            oldest_waiting_s=max((now_s - request.queued_s for request in self.waiting), default=0.0),
            tiers=tuple((tier, TierLoad(running, tokens)) for tier, (running, tokens) in sorted(tiers.items())),
            preemptions=self.preemptions,
            migrations_in=migrations_in,
            migrations_out=migrations_out,
            max_batch=shape.max_batch,
            max_model_tokens=shape.max_model_tokens,
            cost=StepCost(
                cost.decode_base_s,
                cost.decode_per_token_s,
                cost.decode_per_request_s,
                self._last_step_s,
                1 / cost.prefill_per_token_s if cost.prefill_per_token_s else 0.0,
                cost.prefill_base_s,
                cost.prefill_per_token2_s,
            ),
        )

    # -- inside

    def _enter(self, request: EngineRequest) -> None:
        if request.prompt_tokens + request.max_output_tokens > self.shape.capacity_blocks * self.shape.block_tokens:
            raise NoRoom("too_long")
        self._arrivals += 1
        request.rank = (request.priority, self._arrivals)
        request.tokens = request.prompt_tokens + request.output_tokens

    def _queue(self, request: EngineRequest, now_s: float) -> None:
        request.state = RequestState.WAITING
        request.queued_s = now_s
        insort(self.waiting, request, key=_rank)

    def _leave(self, request: EngineRequest) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self._held.pop(request, None)

    def _drop_blocks(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed_tokens = request.cached_tokens = 0

    def _preempt(self, request: EngineRequest, now_s: float) -> None:
        self._drop_blocks(request)
        request.preemptions += 1
        self.preemptions += 1
        self._queue(request, now_s)

    def _hits(self, request: EngineRequest, tokens: int) -> list[int]:
        """Known blocks of its prefix; never all of it, as at least the newest token must be computed."""
        return self.pool.match(request.keys[: (tokens - 1) // self.shape.block_tokens]) if request.keys else []

    def _remember(self, request: EngineRequest, first_block: int) -> None:
        for index in range(first_block, min(len(request.keys), request.computed_tokens // self.shape.block_tokens)):
            self.pool.remember(request.blocks[index], request.keys[index])

    def _schedule_running(self, budget: int, preempted: list[EngineRequest], now_s: float) -> list[tuple[EngineRequest, int]]:
        """In rank order, each gets what the budget leaves; who comes last gives way when memory is short.

        `running` is sorted by rank, so the victim is its last element: never one that already has work in this step.
        """
        pool, running, block_tokens = self.pool, self.running, self.shape.block_tokens
        work: list[tuple[EngineRequest, int]] = []
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.computed_tokens
            n = request.tokens - computed
            if n > budget:
                n = budget
            if computed + n > len(request.blocks) * block_tokens:
                need = -(-(computed + n) // block_tokens) - len(request.blocks)
                while need > pool.free_blocks:
                    victim = running.pop()
                    self._preempt(victim, now_s)
                    preempted.append(victim)
                    if victim is request:
                        break
                if request.state is not RequestState.RUNNING:
                    break
                request.blocks += pool.take(need)
            work.append((request, n))
            budget -= n
            index += 1
        return work

    def _admit(self, budget: int) -> list[tuple[EngineRequest, int]]:
        """From the head of the queue, as long as the whole of the next request fits above the watermark.

        An empty engine ignores the watermark, and a whole prompt longer than the budget may have a FIRST step of its own.
        """
        shape, pool = self.shape, self.pool
        chunked = shape.style is PrefillStyle.CHUNKED
        work: list[tuple[EngineRequest, int]] = []
        while self.waiting and budget > 0 and len(self.running) + len(self._held) < shape.max_batch:
            request = self.waiting[0]
            hits = self._hits(request, request.tokens)
            n = request.tokens - len(hits) * shape.block_tokens
            if n > budget and not chunked and work:
                break
            pool.hold(hits)
            floor = shape.watermark_blocks if self.running or self._held else 0
            if pool.free_blocks - (shape.blocks_for(request.tokens) - len(hits)) < floor:
                pool.release(hits)
                break
            n = min(n, budget) if chunked else n
            request.cached_tokens = request.computed_tokens = len(hits) * shape.block_tokens
            request.blocks = hits + pool.take(shape.blocks_for(request.computed_tokens + n) - len(hits))
            request.state = RequestState.RUNNING
            del self.waiting[0]
            insort(self.running, request, key=_rank)
            work.append((request, n))
            budget -= n
        return work

    def _duration_s(self, done: StepWork) -> float:
        return self.shape.cost.step_s(done.decodes, done.context_tokens, done.prefill_tokens, done.prefill_tokens2)


def _work_of(work: Sequence[tuple[EngineRequest, int]]) -> StepWork:
    decodes = context_tokens = prefill_tokens = prefill_tokens2 = 0
    for request, n in work:
        if n == 1 and request.output_tokens:
            decodes += 1
            context_tokens += request.tokens
        else:
            prefill_tokens += n
            prefill_tokens2 += n * (2 * request.computed_tokens + n)
    return StepWork(decodes, context_tokens, prefill_tokens, prefill_tokens2)
