from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.engine.model import EngineModel, NoRoom
from backend.engine.request import EngineRequest, RequestState
from backend.engine.shape import CostModel, EngineShape, PrefillStyle

STYLES = list(PrefillStyle)


def run_step(model: EngineModel, now_s: float = 0.0) -> list[EngineRequest]:
    assert model.begin_step(now_s) is not None
    return model.end_step()


def shape(
    blocks: int = 64, *, style: PrefillStyle = PrefillStyle.CHUNKED, batch: int = 8, budget: int = 64, watermark: float = 0.0
) -> EngineShape:
    return EngineShape(blocks, block_tokens=4, watermark=watermark, max_batch=batch, max_prefill_tokens=budget, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_a_request_gets_all_its_tokens_and_leaves_nothing(style: PrefillStyle) -> None:
    model = EngineModel(shape(style=style))
    request = EngineRequest(10, 5)
    model.add(request, 0.0)
    assert [run_step(model) for _ in range(5)] == [[request]] * 5
    assert request.state is RequestState.ENDED
    assert request.tokens == 15
    assert model.pool.free_blocks == 64
    assert model.begin_step(0.0) is None


def test_chunked_prefill_shares_the_budget_with_decodes() -> None:
    model = EngineModel(shape(budget=8))
    first, second = EngineRequest(4, 9), EngineRequest(20, 9)
    model.add(first, 0.0)
    run_step(model)
    model.add(second, 0.0)
    step = model.begin_step(0.0)
    assert step is not None
    assert list(step.work) == [(first, 1), (second, 7)]
    assert model.end_step() == [first]
    assert second.computed_tokens == 7
    assert run_step(model) == [first]
    assert run_step(model) == [first, second]


def test_prefill_first_stalls_decodes_for_whole_prompts() -> None:
    model = EngineModel(shape(style=PrefillStyle.FIRST, budget=8))
    first, second = EngineRequest(4, 9), EngineRequest(20, 9)
    model.add(first, 0.0)
    run_step(model)
    model.add(second, 0.0)
    assert run_step(model) == [second]
    assert run_step(model) == [first, second]


def test_the_watermark_stays_free_at_admission_but_not_in_an_empty_engine() -> None:
    model = EngineModel(shape(10, watermark=0.3))
    big, small = EngineRequest(36, 4), EngineRequest(4, 2)
    model.add(big, 0.0)
    model.add(small, 0.0)
    step = model.begin_step(0.0)
    assert step is not None
    assert list(step.admitted) == [big]


@pytest.mark.parametrize("style", STYLES)
def test_the_last_arrived_gives_way_and_computes_again(style: PrefillStyle) -> None:
    model = EngineModel(shape(4, style=style))
    first, last = EngineRequest(8, 8), EngineRequest(7, 4)
    model.add(first, 0.0)
    model.add(last, 0.0)
    assert run_step(model) == [first, last]
    step = model.begin_step(3.0)
    assert step is not None
    assert list(step.preempted) == [last]
    model.end_step()
    assert model.waiting == [last]
    assert (last.computed_tokens, last.blocks, last.output_tokens, last.queued_s) == (0, [], 1, 3.0)
    while model.running or model.waiting:
        run_step(model)
    assert first.tokens == 16
    assert last.tokens == 11
    assert model.pool.free_blocks == 4


def test_the_less_urgent_gives_way_to_one_that_came_later() -> None:
    model = EngineModel(shape(5))
    batch, urgent = EngineRequest(8, 8, priority=2), EngineRequest(7, 8, priority=0)
    model.add(batch, 0.0)
    run_step(model)
    model.add(urgent, 0.0)
    run_step(model)
    while batch.state is RequestState.RUNNING:
        run_step(model)
    assert urgent.state is RequestState.RUNNING
    assert model.preemptions == 1


def test_the_queue_goes_by_priority_then_arrival() -> None:
    model = EngineModel(shape(batch=1))
    late, early, urgent = EngineRequest(4, 1, 1), EngineRequest(4, 1, 1), EngineRequest(4, 1, 0)
    for request in (early, late, urgent):
        model.add(request, 0.0)
    assert [run_step(model)[0] for _ in range(3)] == [urgent, early, late]


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    model = EngineModel(shape())
    model.add(EngineRequest(8, 1, keys=[1, 2]), 0.0)
    run_step(model)
    again = EngineRequest(8, 1, keys=[1, 2])
    model.add(again, 0.0)
    step = model.begin_step(0.0)
    assert step is not None
    assert list(step.work) == [(again, 4)]
    assert again.cached_tokens == 4


def test_a_frozen_request_keeps_its_memory_and_goes_on_after_thaw() -> None:
    model = EngineModel(shape())
    request = EngineRequest(6, 5)
    model.add(request, 0.0)
    run_step(model)
    model.freeze(request)
    assert model.begin_step(0.0) is None
    assert len(request.blocks) == 2
    model.thaw(request)
    assert run_step(model) == [request]


def test_a_running_request_cannot_be_frozen_in_mid_step() -> None:
    model = EngineModel(shape())
    request = EngineRequest(6, 5)
    model.add(request, 0.0)
    model.begin_step(0.0)
    with pytest.raises(ValueError, match="step boundary"):
        model.freeze(request)


def test_a_request_aborted_in_mid_step_gets_nothing() -> None:
    model = EngineModel(shape())
    request = EngineRequest(6, 5)
    model.add(request, 0.0)
    model.begin_step(0.0)
    model.end(request)
    assert model.end_step() == []
    assert model.pool.free_blocks == 64


def test_a_shell_reserves_grows_and_runs_with_what_came() -> None:
    model = EngineModel(shape())
    shell = EngineRequest(10, 9)
    model.add_shell(shell)
    assert model.begin_step(0.0) is None
    assert model.reserve(shell, 3, 14) == 0
    assert len(shell.blocks) == 4
    model.reserve(shell, 3, 17)
    assert len(shell.blocks) == 5
    model.activate(shell, 5, 14, 0.0)
    assert shell.decoding
    assert run_step(model) == [shell]
    assert shell.output_tokens == 6


def test_a_shell_without_copied_kv_waits_to_be_computed() -> None:
    model = EngineModel(shape())
    shell = EngineRequest(10, 9)
    model.add_shell(shell)
    model.activate(shell, 5, 0, 2.0)
    assert shell.state is RequestState.WAITING
    step = model.begin_step(2.0)
    assert step is not None
    assert list(step.work) == [(shell, 15)]


def test_reservations_are_all_or_nothing_and_refused_with_a_reason() -> None:
    model = EngineModel(shape(8, batch=1, watermark=0.25))
    shell, other = EngineRequest(10, 9), EngineRequest(4, 4)
    model.add_shell(shell)
    model.add_shell(other)
    with pytest.raises(NoRoom, match="no_memory"):
        model.reserve(shell, 1, 28)
    assert model.pool.free_blocks == 8
    model.reserve(shell, 1, 24)
    with pytest.raises(NoRoom, match="no_slot"):
        model.reserve(other, 1, 4)
    model.end(shell)
    assert model.pool.free_blocks == 8


def test_what_does_not_fit_at_all_is_refused_at_the_door() -> None:
    with pytest.raises(NoRoom, match="too_long"):
        EngineModel(shape(2)).add(EngineRequest(8, 1), 0.0)


def test_a_pinned_block_outlives_the_preemption_of_its_request() -> None:
    model = EngineModel(shape(4))
    request = EngineRequest(8, 4)
    model.add(request, 0.0)
    run_step(model)
    blocks = model.pin(request, 0, 2)
    model.end(request)
    assert model.pool.free_blocks == 2
    model.unpin(blocks)
    assert model.pool.free_blocks == 4
    with pytest.raises(ValueError, match="blocks 0 to 1 of 0"):
        model.pin(request, 0, 1)


def test_the_report_counts_in_tokens_of_whole_blocks() -> None:
    model = EngineModel(shape(16, batch=1))
    model.add(EngineRequest(6, 5, tier="high"), 0.0)
    run_step(model)
    model.add(EngineRequest(5, 5, 1, "batch"), 1.0)
    model.add(EngineRequest(9, 5, 2, "normal"), 2.0)
    report = model.report(4.0)
    assert (report.capacity_tokens, report.free_tokens, report.running, report.waiting) == (64, 56, 1, 2)
    assert (report.waiting_tokens, report.head_tokens, report.head_tier, report.oldest_waiting_s) == (20, 8, "batch", 3.0)
    assert [(tier, load.running, load.tokens) for tier, load in report.tiers] == [("high", 1, 7)]
    assert report.cost.last_step_s > 0


def test_step_time_follows_the_formula() -> None:
    cost = CostModel(1.0, 0.1, 0.01, 2.0, 0.001, 0.0001)
    assert cost.step_s(3, 50, 0, 0) == pytest.approx(1 + 5 + 0.03)
    assert cost.step_s(0, 0, 10, 100) == pytest.approx(2 + 0.01 + 0.01)
    assert cost.step_s(3, 50, 10, 100) == pytest.approx(2 + 5 + 0.03 + 0.02)


class EngineMachine(RuleBasedStateMachine):
    """Everything that can happen to an engine, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[EngineRequest] = []
        self.pins: list[tuple[int, ...]] = []

    @initialize(style=st.sampled_from(STYLES), blocks=st.integers(6, 24), batch=st.integers(1, 5), budget=st.integers(1, 24))
    def begin(self, style: PrefillStyle, blocks: int, batch: int, budget: int) -> None:
        self.model = EngineModel(shape(blocks, style=style, batch=batch, budget=budget, watermark=0.1))

    def pick(self, index: int, *states: RequestState) -> EngineRequest | None:
        those = [request for request in self.requests if request.state in states]
        return those[index % len(those)] if those else None

    @rule(prompt=st.integers(1, 14), output=st.integers(1, 10), priority=st.integers(0, 2), prefix=st.integers(0, 2), shell=st.booleans())
    def arrive(self, prompt: int, output: int, priority: int, prefix: int, shell: bool) -> None:
        # Equal prefixes have equal keys; the keys of the output are its own.
        keys = [100 * prefix + i for i in range(prompt // 4)] + [1000 * (len(self.requests) + 1) + i for i in range(8)]
        request = EngineRequest(prompt, output, priority, keys=keys if prefix else [])
        try:
            if shell:
                self.model.add_shell(request)
            else:
                self.model.add(request, 0.0)
        except NoRoom:
            return
        self.requests.append(request)

    @precondition(lambda self: not self.model.in_step)
    @rule()
    def begin_step(self) -> None:
        step = self.model.begin_step(1.0)
        if step is not None:
            assert len({request for request, _ in step.work}) == len(step.work) <= self.model.shape.max_batch
            assert not set(step.preempted) & {request for request, _ in step.work}
            assert step.duration_s > 0

    @precondition(lambda self: self.model.in_step)
    @rule()
    def end_step(self) -> None:
        for request in self.model.end_step():
            assert request.output_tokens <= request.max_output_tokens

    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        request = self.pick(index, *RequestState)
        if request is not None:
            self.model.end(request)

    @rule(index=st.integers(0, 50))
    def freeze(self, index: int) -> None:
        states = (RequestState.WAITING,) if self.model.in_step else (RequestState.WAITING, RequestState.RUNNING)
        request = self.pick(index, *states)
        if request is not None:
            before = request.blocks, request.computed_tokens
            self.model.freeze(request)
            assert (request.blocks, request.computed_tokens) == before

    @rule(index=st.integers(0, 50))
    def thaw(self, index: int) -> None:
        request = self.pick(index, RequestState.FROZEN)
        if request is not None:
            self.model.thaw(request)

    @rule(index=st.integers(0, 50), room=st.integers(1, 30), output=st.integers(0, 4))
    def reserve(self, index: int, room: int, output: int) -> None:
        request = self.pick(index, RequestState.SHELL)
        if request is None:
            return
        free = self.model.pool.free_blocks
        held = list(request.blocks)
        try:
            cached_tokens = self.model.reserve(request, output, request.prompt_tokens + room)
        except NoRoom:
            assert self.model.pool.free_blocks == free
            assert request.blocks == held
        else:
            assert request.blocks[: len(held)] == held
            assert cached_tokens % 4 == 0
            assert len(request.blocks) * 4 >= request.prompt_tokens + room

    @rule(index=st.integers(0, 50), output=st.integers(0, 9), copied=st.booleans())
    def activate(self, index: int, output: int, copied: bool) -> None:
        request = self.pick(index, RequestState.SHELL)
        if request is None or output >= request.max_output_tokens:
            return
        computed_tokens = request.prompt_tokens + output - 1 if copied and output else 0
        if self.model.shape.blocks_for(computed_tokens) <= len(request.blocks):
            self.model.activate(request, output, computed_tokens, 0.0)

    @rule(index=st.integers(0, 50))
    def pin(self, index: int) -> None:
        request = self.pick(index, RequestState.RUNNING, RequestState.FROZEN, RequestState.SHELL)
        if request is not None:
            self.pins.append(tuple(self.model.pin(request, 0, len(request.blocks))))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.model.unpin(self.pins.pop())

    @invariant()
    def accounting_is_exact(self) -> None:
        if not hasattr(self, "model"):
            return
        pool = self.model.pool
        owners = Counter(block for request in self.requests for block in request.blocks)
        owners.update(block for pin in self.pins for block in pin)
        assert all(pool.holders(block) == owners[block] for block in range(pool.capacity_blocks))
        assert pool.free_blocks == pool.capacity_blocks - len(owners)
        for request in self.requests:
            assert len(set(request.blocks)) == len(request.blocks)
            assert len(request.blocks) >= self.model.shape.blocks_for(request.computed_tokens)
            assert request.state is not RequestState.ENDED or not request.blocks
            assert request.tokens == request.prompt_tokens + request.output_tokens
        assert self.model.running == sorted(self.model.running, key=lambda request: request.rank)
        assert self.model.waiting == sorted(self.model.waiting, key=lambda request: request.rank)

    @invariant()
    def partial_blocks_are_never_shared(self) -> None:
        written = Counter(
            block
            for request in self.requests
            if request.state in (RequestState.RUNNING, RequestState.FROZEN)
            for block in request.blocks[request.computed_tokens // 4 :]
        )
        assert not written or max(written.values()) == 1

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        if self.model.in_step:
            self.model.end_step()
        for pin in self.pins:
            self.model.unpin(pin)
        for request in self.requests:
            if request.state in (RequestState.FROZEN, RequestState.SHELL):
                self.model.end(request)
        steps = 0
        while self.model.begin_step(0.0) is not None:
            self.model.end_step()
            steps += 1
            assert steps < 5000, "the engine does not get on"
        assert all(request.state is RequestState.ENDED for request in self.requests)
        assert self.model.pool.free_blocks == self.model.pool.capacity_blocks


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_order_of_events = EngineMachine.TestCase
