"""The load of one vLLM scheduler, in the terms of a LoadReport. Reads the scheduler, changes nothing."""

import time

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from backend.engine.vllm import orders


class StepMeter:
    """Times steps: the last pure decode step, and the rate of prefill, each as a running mean."""

    def __init__(self) -> None:
        self.last_step_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.preemptions = 0
        self._started_s = 0.0

    def scheduled(self, output: SchedulerOutput) -> None:
        self._started_s = time.monotonic()
        self.preemptions += len(output.preempted_req_ids or ())

    def processed(self, output: SchedulerOutput) -> None:
        tokens = output.total_num_scheduled_tokens
        elapsed_s = time.monotonic() - self._started_s
        if not tokens or elapsed_s <= 0:
            return
        requests = len(output.num_scheduled_tokens)
        if tokens == requests:
            self.last_step_s = elapsed_s
        elif tokens - requests >= 16:
            rate = tokens / elapsed_s
            self.prefill_tokens_per_s = rate if not self.prefill_tokens_per_s else 0.8 * self.prefill_tokens_per_s + 0.2 * rate


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
        last_step_s=meter.last_step_s,
        prefill_tokens_per_s=meter.prefill_tokens_per_s,
    )


def tier_of(request: Request) -> str:
    """The SLO tier marked on the request; 'normal' for requests that came past the llumlet."""
    extra = (request.sampling_params.extra_args or {}).get(orders.EXTRA_ARG) if request.sampling_params else None
    mark = orders.from_extra(extra) if extra else None
    return mark.tier if isinstance(mark, orders.Mark) else "normal"
