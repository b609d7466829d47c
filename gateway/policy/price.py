"""PURE. What placing a request costs everybody, in weighted seconds.

An instance with context L in n requests of total weight W takes a + b L + c n a step (measured on it). A request of context C and weight w
that will need E more steps, and p to compute its prompt, costs there

    E (w (a + b (L + C) + c (n + 1)) + (b C + c) W) + p W

its own delay, the delay it causes to all who are there, and the stall of its prefill.
"""

from backend.registry.instance import StepCost


def placement_cost_s(
    cost: StepCost, *, tokens: int, requests: int, weight: float, prompt_tokens: int, own_weight: float, steps: float
) -> float:
    """The formula above. Zero as long as the engine has measured nothing."""
    b, c = cost.per_token_s, cost.per_request_s
    own = own_weight * (cost.base_s + b * (tokens + prompt_tokens) + c * (requests + 1))
    prefill_s = prompt_tokens / cost.prefill_tokens_per_s if cost.prefill_tokens_per_s else 0.0
    return steps * (own + (b * prompt_tokens + c) * weight) + prefill_s * weight
