"""vLLM's schedulers, able to let a running request go and to take one in.

Runs in the engine-core process, on its one thread; every method here is called between two steps or inside `schedule` and
`update_from_output`. `MigratingAsyncScheduler` keeps asynchronous scheduling where vLLM uses it, `MigratingScheduler` is for the rest.

- *Freeze*: a request leaves `running` but stays known with its blocks; once no step that contains it is in flight, its KV covers
  all tokens but the newest. *Thaw* puts it back. A frozen request that is aborted goes the way of any other.
- *Shell*: a request that arrives is held: known, not queued. Memory is held for it on order; on Activate it joins the queue of
  requests that hold KV blocks, as one resumed from preemption with nothing left to compute but its next token.
- A shell's new blocks may still be written by a step in flight that was scheduled before their last owner ended; so Held is
  answered only after every such step has been processed (the *fence*).
"""

import time
from typing import Any

import zmq
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from backend.engine.vllm import orders
from backend.engine.vllm.meter import StepMeter, measure_load

LOAD_INTERVAL_S = 0.05
"""Seconds between two load reports when nothing started, ended or was preempted."""


class _Migrating(Scheduler):
    """The additions, over whichever scheduler comes next in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news: zmq.Socket[bytes] | None = None
        self._shells: dict[str, Request] = {}
        self._frozen: dict[str, Request] = {}
        self._draining: dict[str, int] = {}
        """Frozen requests with a step in flight, and the order to answer when it is drained."""
        self._fenced: list[tuple[int, orders.Held]] = []
        self._slots: set[str] = set()
        """Frozen requests that still occupy a slot in the model runner."""
        self._awaiting_grammar: list[orders.Activate] = []
        self._scheduled_steps = 0
        self._processed_steps = 0
        self._meter = StepMeter()
        self._reported_s = 0.0

    # ---- entry points that vLLM calls -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """A request, a shell, or an order."""
        extra = (request.sampling_params.extra_args or {}).get(orders.EXTRA_ARG) if request.sampling_params else None
        message = orders.from_extra(extra) if extra is not None else None
        if message is None or (isinstance(message, orders.Mark) and not message.shell):
            super().add_request(request)
            self._report_load(urgent=True)
        elif isinstance(message, orders.Mark):
            self._shells[request.request_id] = self.requests[request.request_id] = request
            self._send(orders.ShellHeld(request.request_id))
        else:
            self._obey(message)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for activate in self._take_ready_grammars():
            self._activate(activate)
        output = super().schedule(throttle_prefills)
        self._scheduled_steps += 1
        self._meter.scheduled(output, self.requests)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._processed_steps += 1
        self._meter.processed(scheduler_output)
        self._answer_drained()
        self._answer_fenced()
        self._report_load(urgent=bool(self.finished_req_ids or self.reset_preempted_req_ids))
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._forget(request.request_id)
        self._answer_drained()
        if finished:
            self._report_load(urgent=True)
        return finished

    def has_requests(self) -> bool:
        """Also true while an activation waits for its grammar, so that `schedule` comes round to look."""
        return super().has_requests() or bool(self._awaiting_grammar)

    def shutdown(self) -> None:
        if self._news is not None:
            self._news.close(linger=0)  # left open, it would keep the process from ending
            self._news = None
        super().shutdown()

    # ---- orders -----------------------------------------------------------------------------------------------------------

    def _obey(self, order: orders.Order) -> None:
        match order:
            case orders.Hello():
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
                self._news = context.socket(zmq.PUSH)
                self._news.setsockopt(zmq.LINGER, 0)
                self._news.connect(order.address)
                self._send(orders.Done(order.order))
                self._report_load(urgent=True)
            case orders.Look():
                self._send(self._standing(order.order, order.request))
            case orders.Freeze():
                self._freeze(order)
            case orders.Thaw():
                self._thaw(order)
            case orders.Hold():
                self._hold(order)
            case orders.Activate():
                self._begin_activation(order)

    def _standing(self, order: int, request_id: str, *, with_output: bool = False) -> orders.Standing | orders.Failed:
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return orders.Failed(order, "ended")
        phase = _phase(request)
        decoding = phase == "decode"
        return orders.Standing(
            order=order,
            phase=phase,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            settled_tokens=request.num_computed_tokens - request.num_in_flight_tokens if decoding else 0,
            preemptions=request.num_preemptions,
            blocks=list(self.kv_cache_manager.get_block_ids(request_id)[0]) if decoding else [],
            output=list(request.output_token_ids) if with_output else [],
        )

    def _freeze(self, order: orders.Freeze) -> None:
        standing = self._standing(order.order, order.request)
        if isinstance(standing, orders.Failed) or standing.phase == "prefill":
            self._send(standing if isinstance(standing, orders.Failed) else orders.Failed(order.order, "prefill"))
            return
        request = self.requests[order.request]
        if order.request not in self._frozen:
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                request.spec_token_ids = []
                self._slots.add(order.request)
                self.max_num_active_reqs -= 1
            else:
                self.waiting.remove_requests([request])
                self.kv_holding_waiting.remove_requests([request])
                self.deferred_waiting.discard(request)
            self._frozen[order.request] = request
            self._report_load(urgent=True)  # no step may follow that would
        self._draining[order.request] = order.order
        self._answer_drained()

    def _answer_drained(self) -> None:
        for request_id, order in list(self._draining.items()):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                self._forget(request_id)
                self._draining.pop(request_id, None)
                self._send(orders.Failed(order, "ended"))
            elif not (request.num_in_flight_tokens or request.num_output_placeholders):
                del self._draining[request_id]
                self._send(self._standing(order, request_id, with_output=True))

    def _thaw(self, order: orders.Thaw) -> None:
        request = self._frozen.get(order.request)
        self._draining.pop(order.request, None)  # nobody waits for that freeze any more
        if request is not None:
            self._forget(order.request)
            if request.status == RequestStatus.RUNNING:
                self.running.append(request)  # its slot was kept for it
            elif self._is_blocked_waiting_status(request.status):
                self._enqueue_waiting_request(request)
            elif self._holds_kv_blocks(request):
                self.kv_holding_waiting.prepend_request(request)
            else:
                self.waiting.prepend_request(request)
            self._report_load(urgent=True)
        self._send(orders.Done(order.order))

    def _hold(self, order: orders.Hold) -> None:
        request = self._shells.get(order.request)
        if request is None:
            self._send(orders.Failed(order.order, "ended"))
            return
        request.append_output_token_ids(order.output[request.num_output_tokens :])
        first = not self.kv_cache_manager.get_block_ids(order.request)[0]
        cached, cached_tokens = self.kv_cache_manager.empty_kv_cache_blocks, 0
        if first:
            cached, cached_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        room = min(order.room_tokens, self.max_model_len)
        if room > cached_tokens:
            allocated = self.kv_cache_manager.allocate_slots(
                request,
                room - cached_tokens,
                num_new_computed_tokens=cached_tokens,
                new_computed_blocks=cached if first else None,
                delay_cache_blocks=True,
                reserved_blocks=self._inflight_prefill_reserved_blocks(),
            )
            if allocated is None:
                self._send(orders.Failed(order.order, "no_memory"))
                return
        blocks = list(self.kv_cache_manager.get_block_ids(order.request)[0])
        self._fenced.append((self._scheduled_steps, orders.Held(order.order, cached_tokens, blocks)))
        self._answer_fenced()
        self._report_load(urgent=True)

    def _answer_fenced(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._processed_steps:
            self._send(self._fenced.pop(0)[1])

    def _begin_activation(self, order: orders.Activate) -> None:
        request = self._shells.get(order.request)
        if request is None:
            self._send(orders.Failed(order.order, "ended"))
        elif request.use_structured_output and order.output:
            self._awaiting_grammar.append(order)
        else:
            self._activate(order)

    def _take_ready_grammars(self) -> list[orders.Activate]:
        ready = [order for order in self._awaiting_grammar if self._grammar_settled(order.request)]
        self._awaiting_grammar = [order for order in self._awaiting_grammar if order not in ready]
        return ready

    def _grammar_settled(self, request_id: str) -> bool:
        shell = self._shells.get(request_id)
        return shell is None or shell.structured_output_request is None or shell.structured_output_request.is_grammar_ready

    def _activate(self, order: orders.Activate) -> None:
        request = self._shells.get(order.request)
        failure = "ended" if request is None else self._unfit(request, order)
        if request is None or failure:
            self._send(orders.Failed(order.order, failure))
            return
        del self._shells[order.request]
        if not request.num_output_tokens:
            del self.requests[order.request]
            super().add_request(request)
        else:
            request.status = RequestStatus.PREEMPTED
            request.num_preemptions = 1
            request.prefill_stats = None
            request.num_computed_tokens = order.computed_tokens
            if order.computed_tokens:
                self.kv_cache_manager.cache_blocks(request, order.computed_tokens)
                self.kv_holding_waiting.prepend_request(request)
            else:
                self.kv_cache_manager.free(request)  # what was copied before its source lost the rest
                self.waiting.prepend_request(request)
        self._send(orders.Done(order.order))
        self._report_load(urgent=True)

    def _unfit(self, request: Request, order: orders.Activate) -> str:
        """Bring the shell to its last token; answer why it cannot run, or ''."""
        fresh = order.output[request.num_output_tokens :]
        request.append_output_token_ids(fresh)
        if order.computed_tokens:
            held = len(self.kv_cache_manager.get_block_ids(order.request)[0]) * self.block_size
            if order.computed_tokens != request.num_tokens - 1 or order.computed_tokens > held:
                return "not_covered"
        structured = request.structured_output_request
        if structured is not None and order.output:
            if isinstance(structured.grammar, Exception):
                return "grammar"
            if not self.structured_output_manager.accept_tokens(request, list(order.output)):
                return "grammar"
        return ""

    def _forget(self, request_id: str) -> None:
        """A frozen request or a shell is no longer special: thawed, activated or gone."""
        self._frozen.pop(request_id, None)
        self._shells.pop(request_id, None)
        if request_id in self._slots:
            self._slots.remove(request_id)
            self.max_num_active_reqs += 1

    # ---- news -------------------------------------------------------------------------------------------------------------

    def _send(self, message: orders.Reply | orders.News) -> None:
        if self._news is not None:
            self._news.send(orders.encode(message))

    def _report_load(self, *, urgent: bool) -> None:
        """Urgent news always goes out (the llumlet paces what it publishes): held back, it would leave an idle engine looking busy."""
        now = time.monotonic()
        if self._news is None or (not urgent and now - self._reported_s < LOAD_INTERVAL_S):
            return
        self._reported_s = now
        self._send(measure_load(self, self._meter, urgent))


def _phase(request: Request) -> str:
    """A request that is computed anew after a preemption counts as waiting: its blocks are not complete, so it moves without them."""
    if request.status != RequestStatus.RUNNING or (request.num_output_tokens and request.is_prefill_chunk):
        return "waiting"
    return "decode" if request.num_output_tokens else "prefill"


class MigratingScheduler(_Migrating):
    """For engines that vLLM runs without asynchronous scheduling (CPUs)."""


class MigratingAsyncScheduler(_Migrating, AsyncScheduler):
    """For engines that vLLM runs with asynchronous scheduling (GPUs)."""
