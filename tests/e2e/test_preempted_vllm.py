"""Memory that is short everywhere: vLLM preempts, what it preempted waits in line, and every answer is the undisturbed one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from deploy.model import ensure_model
from deploy.settings import DeploySettings
from deploy.up import Model, UpOptions
from tests.e2e.answers import Answer, assert_same
from tests.e2e.conftest import FLAGS
from tests.e2e.fleet import Fleet, open_fleet

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PATH = "/v1/completions"
BLOCKS = 40
PROMPT = [1000 + 7 * position % 20000 for position in range(300)]
TOKENS, REQUESTS = 300, 6
"""Three on each of two instances start in 900 tokens of 1,280, and want 1,800."""


def body(salt: str) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True, "cache_salt": salt}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two instances with little memory, and a gateway that rebalances."""
    pytest.importorskip("vllm", reason="the light environment has no vllm")
    path = ensure_model(DeploySettings())
    async with open_fleet(
        tmp_path_factory.mktemp("logs"),
        UpOptions(engine="vllm", instances=2),
        Model(str(path), path.name),
        arguments=[*FLAGS, "--num-gpu-blocks-override", str(BLOCKS)],
        backend_environment={"VLLM_LOGGING_LEVEL": "WARNING"},
        gateway_environment={"MIDSTREAM_POLICY_OPTIONS": '{"growth": 0.0}'},
        start_timeout_s=240.0,
    ) as fleet:
        yield fleet


async def test_what_vllm_preempts_waits_in_line_and_nobody_can_tell(tight_fleet: Fleet) -> None:
    fleet = tight_fleet
    undisturbed = await fleet.ask(PATH, body("alone"))
    answers = [Answer(fleet.next_request()) for _ in range(REQUESTS)]
    async with asyncio.TaskGroup() as asking:
        for number, answer in enumerate(answers):
            asking.create_task(fleet.read(answer, PATH, body(f"crowd-{number}")))
    for answer in answers:
        assert_same(answer, undisturbed)
    text = (await fleet.client.get(f"{fleet.gateway_url}/metrics")).text
    counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("midstream_gateway_resumes_total"))
    assert float(counted.pop('midstream_gateway_resumes_total{outcome="resumed",reason="preempted"}')) >= 1
    assert not counted
    await fleet.settle()
