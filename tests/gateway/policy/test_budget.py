from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.budget import Budget


@given(st.floats(0.1, 50), st.lists(st.floats(0, 0.5), min_size=1, max_size=200))
def test_no_more_than_the_rate_and_a_seconds_worth(per_s: float, pauses: list[float]) -> None:
    budget, now_s, spent = Budget(per_s), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        left = budget.spend(now_s)
        if left is not None:
            budget, spent = left, spent + 1
    assert 1 <= spent <= max(1.0, per_s) + per_s * now_s + 1e-6


def test_without_a_rate_there_is_no_bound() -> None:
    budget = Budget(0.0)
    for _ in range(1000):
        left = budget.spend(0.0)
        assert left is not None
        budget = left
