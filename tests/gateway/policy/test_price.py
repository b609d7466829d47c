import pytest

from backend.registry.instance import StepCost
from gateway.policy.price import placement_cost_s
from tests.gateway.policy.views import COST


def price(tokens: int, requests: int, weight: float, own_weight: float = 1.0, cost: StepCost = COST) -> float:
    return placement_cost_s(cost, tokens=tokens, requests=requests, weight=weight, prompt_tokens=400, own_weight=own_weight, steps=100.0)


def test_the_formula() -> None:
    own = 0.024 + 3.5e-6 * 1400 + 0.15e-3 * 6
    others = (3.5e-6 * 400 + 0.15e-3) * 7
    assert price(1000, 5, 7.0) == pytest.approx(100 * (own + others) + 0.1 * 7)


def test_company_and_context_cost() -> None:
    assert price(0, 0, 0.0) < price(1000, 1, 1.0) < price(1000, 5, 5.0) < price(1000, 5, 14.0)


def test_an_urgent_request_pays_more_for_a_slow_place() -> None:
    assert price(9000, 9, 9.0, 10.0) - price(0, 0, 0.0, 10.0) > price(9000, 9, 9.0) - price(0, 0, 0.0)


def test_unmeasured_means_free() -> None:
    assert price(1000, 5, 7.0, cost=StepCost()) == 0.0
