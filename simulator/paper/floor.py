"""PURE. How few instances could carry a load at all, whatever the policy.

An instance produces most when its memory of M tokens is full: its step of a + b L + c n seconds then serves n requests of M / n tokens. So
a token at context C costs at least C (a / M + b) + c of an instance's time, and a prompt what its prefill takes. The sum over a trace, over
the time it took to serve it, is a mean number of instances that no policy can go below.
"""

from collections.abc import Iterable

from simulator.scenario import Scenario
from simulator.workload import Arrival


def floor_instances(scenario: Scenario, arrivals: Iterable[Arrival], duration_s: float) -> float:
    """Instances, in the mean over `duration_s`."""
    cluster, cost = scenario.cluster, scenario.cost
    a_token = cost.decode_base_s / (cluster.capacity_blocks * cluster.block_tokens) + cost.decode_per_token_s
    needed_s = 0.0
    for each in arrivals:
        prompt, steps = each.prompt_tokens, each.output_tokens - 1
        contexts = steps * prompt + steps * (steps + 1) / 2
        needed_s += contexts * a_token + steps * cost.decode_per_request_s
        needed_s += prompt * cost.prefill_per_token_s + prompt**2 * cost.prefill_per_token2_s
    return needed_s / duration_s
