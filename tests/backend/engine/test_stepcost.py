"""The fit recovers what a modelled engine costs, from its steps alone."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.model import EngineModel
from backend.engine.request import EngineRequest
from backend.engine.shape import CostModel, EngineShape, PrefillStyle
from backend.engine.stepcost import SOLVE_EVERY, StepCostFit, StepWork
from backend.registry.instance import StepCost

A10 = CostModel(0.024, 3.5e-6, 0.15e-3, 0.005, 14e9 / 62e12, 2 * 4096 * 32 / 40e12)


def learn(cost: CostModel, style: PrefillStyle, *, noise: float = 0.0, steps: int = 3000, fit: StepCostFit | None = None) -> StepCostFit:
    """Serve a random load for so many steps."""
    rng, fit = Random(5), fit or StepCostFit()
    model = EngineModel(EngineShape(4000, cost=cost, style=style, max_model_tokens=4096, max_batch=64))
    now_s = 0.0
    for _ in range(steps):
        while len(model.waiting) + len(model.running) < 40 and rng.random() < 0.3:
            model.add(EngineRequest(rng.randint(20, 2500), rng.randint(5, 200)), now_s)
        step = model.begin_step(now_s)
        if step is None:
            now_s += 0.01
            continue
        fit.note(step.done, step.duration_s * rng.uniform(1 - noise, 1 + noise))
        now_s += step.duration_s
        model.end_step()
    return fit


def assert_near(found: StepCost, true: CostModel, within: float) -> None:
    assert found.base_s == pytest.approx(true.decode_base_s, rel=within)
    assert found.per_token_s == pytest.approx(true.decode_per_token_s, rel=within)
    assert found.per_request_s == pytest.approx(true.decode_per_request_s, rel=within)
    assert found.prefill_tokens_per_s == pytest.approx(1 / true.prefill_per_token_s, rel=within)


def decode_s(cost: StepCost, decodes: int, context_tokens: int) -> float:
    return cost.base_s + cost.per_token_s * context_tokens + cost.per_request_s * decodes


@pytest.mark.parametrize("style", list(PrefillStyle))
def test_the_fake_engines_cost_model_is_recovered(style: PrefillStyle) -> None:
    found = learn(CostModel(), style).cost()
    assert_near(found, CostModel(), 0.1)
    assert found.prefill_base_s == pytest.approx(CostModel().prefill_base_s, rel=0.1)


@pytest.mark.parametrize("style", list(PrefillStyle))
def test_so_is_that_of_the_papers_gpu_and_with_noise(style: PrefillStyle) -> None:
    assert_near(learn(A10, style).cost(), A10, 0.1)
    noisy = learn(A10, style, noise=0.05).cost()
    assert noisy.per_token_s == pytest.approx(A10.decode_per_token_s, rel=0.1)
    assert noisy.prefill_tokens_per_s == pytest.approx(1 / A10.prefill_per_token_s, rel=0.1)
    assert decode_s(noisy, 30, 40_000) == pytest.approx(A10.step_s(30, 40_000, 0, 0), rel=0.05)


def test_an_engine_that_changes_is_followed() -> None:
    fit = learn(CostModel(), PrefillStyle.CHUNKED)
    assert_near(learn(A10, PrefillStyle.CHUNKED, fit=fit, steps=8000).cost(), A10, 0.1)


def test_a_step_that_the_machine_held_up_counts_little() -> None:
    fit = learn(A10, PrefillStyle.CHUNKED)
    fit.note(StepWork(20, 20_000), 60.0)
    for _ in range(SOLVE_EVERY):
        fit.note(StepWork(30, 40_000), A10.step_s(30, 40_000, 0, 0))
    assert decode_s(fit.cost(), 30, 40_000) == pytest.approx(A10.step_s(30, 40_000, 0, 0), rel=0.05)


def test_nothing_is_known_before_anything_ran() -> None:
    fit = StepCostFit()
    assert fit.cost() == StepCost()
    fit.note(StepWork(0, 0), 1.0)
    fit.note(StepWork(1, 10), 0.0)
    assert fit.cost() == StepCost()


@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 100_000), st.integers(0, 4096), st.integers(0, 10**7), st.floats(-1, 100)), max_size=60
    )
)
def test_no_coefficient_is_ever_negative_or_unbounded(steps: list[tuple[int, int, int, int, float]]) -> None:
    fit = StepCostFit()
    for decodes, context_tokens, prefill_tokens, prefill_tokens2, took_s in steps:
        fit.note(StepWork(decodes, context_tokens, prefill_tokens, prefill_tokens2), took_s)
        found = fit.cost()
        for value in (found.base_s, found.per_token_s, found.per_request_s, found.prefill_base_s, found.prefill_per_token2_s):
            assert 0 <= value <= 200
        assert 0 <= found.prefill_tokens_per_s < float("inf")
