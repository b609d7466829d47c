"""What the engine client tells the engine of a request."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from backend.engine.flight import Flight, current_flight
from backend.engine.vllm.client import MigratingLLM
from migration.leg import Leg, RequestId
from migration.messages import HttpRequest

pytestmark = pytest.mark.engine


class Client(MigratingLLM):
    """Without an engine."""

    def __init__(self, policy: str) -> None:
        self.vllm_config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.asked: dict[str, Any] = {}

    async def add_request(self, request_id: str, prompt: Any, params: Any, **keywords: Any) -> Any:
        self.asked = keywords
        raise VLLMClientError("seen; no more is needed here")


@pytest.mark.parametrize(("policy", "priority"), [("priority", 2), ("fcfs", 7)])
async def test_the_rank_of_its_tier_is_the_engines_priority_whatever_the_body_said(policy: str, priority: int) -> None:
    client = Client(policy)
    token = current_flight.set(Flight(Leg(RequestId("r"), 0), HttpRequest("/v1/completions", (), b""), tier="batch", rank=2))
    try:
        with pytest.raises(VLLMClientError):
            async for _ in client.generate("hello", SamplingParams(), "r", priority=7):
                pass
    finally:
        current_flight.reset(token)
    assert client.asked == {"priority": priority}
