"""The load of one vLLM scheduler, in the terms of a LoadReport. Reads the scheduler, changes nothing."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from backend.engine.stepcost import StepCostFit, StepWork
from backend.engine.vllm import orders
from backend.registry.instance import StepCost


class StepMeter:
    """Times steps and learns what they cost. A step that was scheduled while another was under way lasts from that one's end."""

    def __init__(self) -> None:
        self.preemptions = 0
        self._fit = StepCostFit()
        self._under_way: deque[tuple[SchedulerOutput, float, StepWork]] = deque()
        self._ended_s = 0.0

    @property
    def cost(self) -> StepCost:
        return self._fit.cost()

    def scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """This runs now. `requests` are those of the scheduler, which counts the step's tokens as computed already."""
        self.preemptions += len(output.preempted_req_ids or ())
        self._under_way.append((output, time.monotonic(), _work_of(output, requests)))

    def processed(self, output: SchedulerOutput) -> None:
        """This is over; steps scheduled before it that were never processed count for nothing."""
        now_s = time.monotonic()
        while self._under_way:
            scheduled, started_s, work = self._under_way.popleft()
            if scheduled is output:
                self._fit.note(work, now_s - max(started_s, self._ended_s))
                break
        self._ended_s = now_s


def _work_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepWork:
    decodes = context_tokens = prefill_tokens = prefill_tokens2 = 0
    for request_id, n in output.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if request is None:
            continue
        end = request.num_computed_tokens
        if n == 1 and end > request.num_prompt_tokens:
            decodes += 1
            context_tokens += end
        else:
            prefill_tokens += n
            prefill_tokens2 += n * (2 * end - n)
    return StepWork(decodes, context_tokens, prefill_tokens, prefill_tokens2)


def measure_load(scheduler: Scheduler, meter: StepMeter, urgent: bool) -> orders.Load:
    """The load now. O(running + waiting), so it is made at most every few milliseconds."""
    block = scheduler.block_size
    pool = scheduler.kv_cache_manager.block_pool
    waiting = [*scheduler.kv_holding_waiting, *scheduler.waiting]
    demands = [-(-request.num_tokens // block) * block for request in waiting]
    tiers: dict[str, orders.TierCount] = {}
    for request in scheduler.running:
        name = tier_of(request)
        before = tiers.get(name, orders.TierCount(name, 0, 0))
        tiers[name] = orders.TierCount(name, before.running + 1, before.tokens + request.num_tokens)
    now = time.time()  # noqa: TID251  # vLLM stamps arrivals with the wall clock
    return orders.Load(
        urgent=urgent,
        capacity_tokens=(pool.num_gpu_blocks - 1) * block,  # one block is vLLM's null block
        free_tokens=pool.get_num_free_blocks() * block,
        block_tokens=block,
        running=len(scheduler.running),
        waiting=len(waiting),
        waiting_tokens=sum(demands),
        head_tokens=demands[0] if demands else 0,
        head_tier=tier_of(waiting[0]) if waiting else "",
        oldest_waiting_s=max((max(0.0, now - request.arrival_time) for request in waiting), default=0.0),
        tiers=list(tiers.values()),
        preemptions=meter.preemptions,
        cost=orders.Cost(**asdict(meter.cost)),
    )


def tier_of(request: Request) -> str:
    """The SLO tier marked on the request; 'normal' for requests that came past the llumlet."""
    extra = (request.sampling_params.extra_args or {}).get(orders.EXTRA_ARG) if request.sampling_params else None
    mark = orders.from_extra(extra) if extra else None
    return mark.tier if isinstance(mark, orders.Mark) else "normal"
