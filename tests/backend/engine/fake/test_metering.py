"""The fake engine publishes what it measured, not what it was told."""

import asyncio

from backend.engine.fake.engine import build_fake_engine
from backend.engine.fake.sampling import Sampling
from backend.engine.fake.settings import FakeSettings
from backend.registry.instance import StepCost


async def test_the_report_holds_measured_costs() -> None:
    settings = FakeSettings.model_validate({"decode_base_s": 0.004, "prefill_base_s": 0.004, "eos_one_in": 0, "prefix_cache": False})
    engine = build_fake_engine(settings, "127.0.0.1")
    async with asyncio.timeout(20), engine.running():
        assert engine.load().cost == StepCost()
        for prompt in (200, 1500):
            async for _ in engine.generate(tuple([7] * prompt), Sampling(max_tokens=20, ignore_eos=True)):
                pass
        cost = engine.load().cost
    assert cost.last_step_s >= 0.004
    assert cost.base_s + cost.per_request_s + 1700 * cost.per_token_s >= 0.004
    assert cost.prefill_tokens_per_s > 0
