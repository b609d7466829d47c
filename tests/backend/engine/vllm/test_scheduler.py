"""Our additions on vLLM's own schedulers, with steps in flight as on a GPU: the test plays the model and decides when a step is over."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the light environment has no vllm")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from backend.engine.vllm import orders
from backend.engine.vllm.scheduler import MigratingAsyncScheduler, MigratingScheduler

BLOCK_TOKENS, BLOCKS, SLOTS, BUDGET_TOKENS = 16, 32, 3, 64
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


class Mailbox:
    """Stands for the socket to the API process."""

    def __init__(self) -> None:
        self.heard: list[orders.Reply | orders.News] = []

    def send(self, data: bytes) -> None:
        self.heard.append(orders.decode(data))

    def reply(self, order: int) -> orders.Reply | None:
        return next((m for m in self.heard if not isinstance(m, orders.Load | orders.ShellHeld) and m.order == order), None)


class Engine:
    """vLLM's engine core in miniature: up to `depth` steps in flight, and token number n of any request is 100 + n."""

    def __init__(self, scheduler: Any, depth: int) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.mailbox = scheduler._news = Mailbox()
        self.in_flight: deque[tuple[Any, list[str]]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self._orders = 0
        init_none_hash(sha256)

    def add(self, name: str, prompt_tokens: int = 20, max_tokens: int = 50, **extra: Any) -> Any:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, list(range(1, prompt_tokens + 1)), params, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        return request

    def shell(self, name: str, **shape: Any) -> Any:
        return self.add(name, **shape, **{orders.EXTRA_ARG: orders.to_extra(orders.Mark("normal", shell=True))})

    def order(self, make: Callable[[int], orders.Order]) -> int:
        self._orders += 1
        self.add(f"order-{self._orders}", 1, 1, **{orders.EXTRA_ARG: orders.to_extra(make(self._orders))})
        return self._orders

    def ask(self, make: Callable[[int], orders.Order]) -> orders.Reply | None:
        return self.mailbox.reply(self.order(make))

    def begin(self) -> Any:
        """Schedule a step; the oldest ends first if no more may be in flight."""
        if len(self.in_flight) == self.depth:
            self.end()
        step = self.scheduler.schedule()
        sampled = [name for name in step.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk]
        self.in_flight.append((step, sampled))
        return step

    def end(self) -> None:
        """The oldest step is over."""
        step, sampled = self.in_flight.popleft()
        names = list(step.num_scheduled_tokens)
        tokens = [self._next(name) if name in sampled else [] for name in names]
        answer = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens, prompt_logprobs_dict={})
        for outputs in self.scheduler.update_from_output(step, answer).values():
            for output in outputs.outputs:
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)

    def _next(self, name: str) -> list[int]:
        request = self.scheduler.requests.get(name)
        return [100 + request.num_output_tokens] if request is not None else [0]

    def run(self, steps: int) -> Any:
        """Run so many steps, as many in flight as may be; answers the last one scheduled."""
        step = None
        for _ in range(steps):
            step = self.begin()
            if len(self.in_flight) == self.depth:
                self.end()
        return step

    def settle(self) -> None:
        while self.in_flight:
            self.end()


@pytest.fixture(params=["sync", "async V1", "async V2"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    is_async = request.param != "sync"
    config = VllmConfig(
        model_config=ModelConfig(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=BUDGET_TOKENS,
            max_model_len=512,
            is_encoder_decoder=False,
            async_scheduling=is_async,
            policy="priority",
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    scheduler = (MigratingAsyncScheduler if is_async else MigratingScheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )
    scheduler.use_v2_model_runner = request.param == "async V2"
    return Engine(scheduler, 2 if is_async else 1)


def counted(tokens: int) -> list[int]:
    """The first so many output tokens of any request."""
    return [100 + number for number in range(tokens)]


def test_freezing_waits_for_what_is_in_flight_and_for_nothing_else(engine: Engine) -> None:
    moving, other = engine.add("moving"), engine.add("other")
    engine.run(6)
    while len(engine.in_flight) < engine.depth - 1:
        engine.begin()
    order = engine.order(lambda number: orders.Freeze(number, "moving"))
    in_flight = sum("moving" in step.num_scheduled_tokens for step, _ in engine.in_flight)
    assert in_flight == engine.depth - 1
    for _ in range(in_flight):
        assert engine.mailbox.reply(order) is None
        engine.end()
    standing = engine.mailbox.reply(order)
    assert isinstance(standing, orders.Standing)
    assert standing.output == counted(moving.num_output_tokens) == engine.outputs["moving"]
    assert standing.settled_tokens == moving.num_tokens - 1
    assert len(standing.blocks) * BLOCK_TOKENS >= standing.settled_tokens
    before = other.num_output_tokens
    assert "moving" not in engine.run(5).num_scheduled_tokens
    engine.settle()
    assert other.num_output_tokens > before
    assert moving.num_output_tokens == standing.output_tokens


def test_a_thawed_request_goes_on_where_it_stopped(engine: Engine) -> None:
    moving = engine.add("moving", max_tokens=30)
    engine.add("other", max_tokens=300)
    engine.run(6)
    engine.order(lambda number: orders.Freeze(number, "moving"))
    engine.settle()
    engine.run(3)
    computed = moving.num_computed_tokens
    assert isinstance(engine.ask(lambda number: orders.Thaw(number, "moving")), orders.Done)
    step = engine.begin()
    assert step.num_scheduled_tokens["moving"] == 1
    assert "moving" in step.scheduled_cached_reqs.req_ids
    assert "moving" not in step.scheduled_cached_reqs.resumed_req_ids
    assert step.scheduled_cached_reqs.num_computed_tokens[step.scheduled_cached_reqs.req_ids.index("moving")] == computed
    engine.settle()
    engine.run(40)
    assert engine.outputs["moving"] == counted(30)


def test_a_thaw_in_mid_drain_leaves_no_trace(engine: Engine) -> None:
    engine.add("moving", max_tokens=30)
    engine.run(6)
    order = engine.order(lambda number: orders.Freeze(number, "moving"))
    assert isinstance(engine.ask(lambda number: orders.Thaw(number, "moving")), orders.Done)
    engine.run(40)
    engine.settle()
    assert engine.outputs["moving"] == counted(30)
    assert (engine.mailbox.reply(order) is None) == (engine.depth > 1)


@pytest.mark.parametrize("engine", ["async V1", "async V2"], indirect=True)
def test_a_request_that_ends_while_it_is_drained_has_ended(engine: Engine) -> None:
    engine.add("moving", max_tokens=4)
    while not any("moving" in step.num_scheduled_tokens and len(engine.outputs.get("moving", ())) == 3 for step, _ in engine.in_flight):
        engine.run(1)
    order = engine.order(lambda number: orders.Freeze(number, "moving"))
    engine.settle()
    assert engine.mailbox.reply(order) == orders.Failed(order, "ended")
    assert engine.outputs["moving"] == counted(4)
    assert engine.scheduler.max_num_active_reqs == SLOTS
    assert not engine.scheduler._frozen


def test_a_frozen_request_keeps_its_slot_until_it_leaves(engine: Engine) -> None:
    for name in "abcd":
        engine.add(name, max_tokens=300)
    engine.run(4)
    waiting = engine.scheduler.requests["d"]
    engine.order(lambda number: orders.Freeze(number, "a"))
    engine.settle()
    engine.run(4)
    assert waiting.status == RequestStatus.WAITING
    engine.order(lambda number: orders.Thaw(number, "a"))
    assert {request.request_id for request in engine.scheduler.running} == set("abc")
    engine.settle()
    engine.order(lambda number: orders.Freeze(number, "a"))
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.run(4)
    assert waiting.status == RequestStatus.RUNNING
    assert engine.scheduler.max_num_active_reqs == SLOTS


def arrive(engine: Engine, output: int, room: int = 96) -> tuple[Any, orders.Held]:
    """A shell with so many known tokens, and memory held for it."""
    shell = engine.shell("moving")
    order = engine.order(lambda number: orders.Hold(number, "moving", counted(output), room))
    engine.settle()
    held = engine.mailbox.reply(order)
    assert isinstance(held, orders.Held)
    return shell, held


def test_a_shell_runs_as_a_request_with_one_token_to_compute(engine: Engine) -> None:
    engine.add("other", prompt_tokens=33, max_tokens=300)
    engine.run(4)
    shell, held = arrive(engine, 40)
    assert len(held.blocks) == 96 // BLOCK_TOKENS
    done = engine.ask(lambda number: orders.Activate(number, "moving", counted(45), shell.num_prompt_tokens + 44))
    assert isinstance(done, orders.Done)
    step = engine.begin()
    assert step.num_scheduled_tokens["moving"] == 1
    if engine.scheduler.use_v2_model_runner:
        (data,) = step.scheduled_new_reqs
        assert data.prefill_token_ids == [*range(1, 21), *counted(45)]
        assert (data.num_computed_tokens, data.prompt_len, data.block_ids) == (64, 20, (held.blocks,))
    else:
        cached = step.scheduled_cached_reqs
        at = cached.req_ids.index("moving")
        assert cached.resumed_req_ids == {"moving"}
        assert (cached.num_computed_tokens[at], cached.num_output_tokens[at], cached.new_block_ids[at]) == (64, 45, (held.blocks,))
        assert cached.all_token_ids["moving"] == [*range(1, 21), *counted(45)]
    engine.run(10)
    engine.settle()
    assert engine.outputs["moving"] == counted(50)[45:]


def test_memory_is_held_only_once_no_step_in_flight_can_write_it(engine: Engine) -> None:
    engine.add("other", max_tokens=300)
    engine.run(3)
    engine.shell("moving")
    engine.begin()
    order = engine.order(lambda number: orders.Hold(number, "moving", counted(3), 64))
    while engine.in_flight:
        assert engine.mailbox.reply(order) is None
        engine.end()
    assert isinstance(engine.mailbox.reply(order), orders.Held)


def test_a_shell_that_is_computed_anew_gives_back_what_it_held(engine: Engine) -> None:
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    arrive(engine, 40)
    assert isinstance(engine.ask(lambda number: orders.Activate(number, "moving", counted(40), 0)), orders.Done)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    engine.run(30)
    engine.settle()
    assert engine.outputs["moving"] == counted(50)[40:]


def test_a_shell_whose_blocks_do_not_cover_it_is_refused(engine: Engine) -> None:
    arrive(engine, 40)

    def activate(computed_tokens: int) -> int:
        return engine.order(lambda number: orders.Activate(number, "moving", counted(40), computed_tokens))

    for order in (activate(58), activate(60)):
        assert engine.mailbox.reply(order) == orders.Failed(order, "not_covered")
    engine.scheduler.finish_requests(["moving"], RequestStatus.FINISHED_ABORTED)
    assert not engine.scheduler._shells
    order = engine.order(lambda number: orders.Hold(number, "moving", counted(40), 96))
    assert engine.mailbox.reply(order) == orders.Failed(order, "ended")


def test_memory_that_is_not_there_is_refused(engine: Engine) -> None:
    engine.shell("moving")
    order = engine.order(lambda number: orders.Hold(number, "moving", counted(3), BLOCKS * BLOCK_TOKENS))
    assert engine.mailbox.reply(order) == orders.Failed(order, "no_memory")


def test_a_request_computed_anew_counts_as_waiting_and_thaws_into_its_batch(engine: Engine) -> None:
    moving = engine.add("moving", prompt_tokens=150, max_tokens=20)
    engine.run(8)
    engine.settle()
    engine.scheduler.running.remove(moving)
    engine.scheduler._preempt_request(moving, 0.0)
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.begin()
    engine.settle()
    assert moving.status == RequestStatus.RUNNING
    assert moving.num_computed_tokens < moving.num_tokens - 1
    standing = engine.ask(lambda number: orders.Freeze(number, "moving"))
    assert isinstance(standing, orders.Standing)
    assert (standing.phase, standing.settled_tokens, standing.blocks) == ("waiting", 0, [])
    assert standing.output == counted(moving.num_output_tokens)
    engine.order(lambda number: orders.Thaw(number, "moving"))
    engine.run(40)
    engine.settle()
    assert engine.outputs["moving"] == counted(20)


def test_a_frozen_arrival_that_has_not_run_yet_thaws_with_its_blocks(engine: Engine) -> None:
    shell, held = arrive(engine, 40)
    engine.order(lambda number: orders.Activate(number, "moving", counted(40), 59))
    standing = engine.ask(lambda number: orders.Freeze(number, "moving"))
    assert isinstance(standing, orders.Standing)
    assert standing.phase == "waiting"
    engine.order(lambda number: orders.Thaw(number, "moving"))
    assert list(engine.scheduler.kv_holding_waiting) == [shell]
    step = engine.begin()
    assert step.num_scheduled_tokens == {"moving": 1}
    assert list(engine.scheduler.kv_cache_manager.get_block_ids("moving")[0]) == held.blocks
    engine.settle()
    engine.run(12)
    engine.settle()
    assert engine.outputs["moving"] == counted(50)[40:]
