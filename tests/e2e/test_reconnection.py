"""A gateway is killed while a client reads from it: the client reads on at another one, and has every event once, and nothing else."""

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.chaos.client import whole_events
from bench.chaos.fleet import ChaosFleet, open_fleet
from bench.chaos.pace import PACES
from bench.chaos.verdict import comparable
from deploy.up import Model, UpOptions

pytestmark = [pytest.mark.deaths, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

PATH = "/v1/chat/completions"
CURSOR = re.compile(rb"^id: ?([^\n]*)\n", re.MULTILINE)
READ_EVENTS = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosFleet]:
    options = UpOptions(engine="fake", instances=2)
    async with open_fleet(tmp_path_factory.mktemp("logs"), options, Model("fake", "fake"), gateways=2, pace=PACES["fake"]) as opened:
        yield opened


def body(**more: Any) -> dict[str, Any]:
    text = "They crossed the river on a borrowed horse."
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 300, "ignore_eos": True, "stream": True, **more}


async def read_some(response: aiohttp.ClientResponse) -> bytes:
    """Whole events, some dozens of them."""
    seen = b""
    while len(CURSOR.findall(seen)) < READ_EVENTS:
        seen += await response.content.readany()
    return whole_events(seen)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seeded"])
async def test_a_client_reads_on_at_another_gateway(fleet: ChaosFleet, sampling: dict[str, Any]) -> None:
    await fleet.mend()
    first, second = fleet.gateways
    disturbed, whole = (f"{name}-{len(sampling)}" for name in ("disturbed", "undisturbed"))
    headers = {"x-midstream-resumable": "1"}
    async with fleet.client.post(first.url + PATH, json=body(**sampling), headers={**headers, "x-request-id": whole}) as response:
        undisturbed = await response.read()
    assert undisturbed.endswith(b"data: [DONE]\n\n")

    async with fleet.client.post(first.url + PATH, json=body(**sampling), headers={**headers, "x-request-id": disturbed}) as response:
        assert response.headers["x-midstream-resumable"] == "1"
        seen = await read_some(response)
        await first.process.kill()
    last = CURSOR.findall(seen)[-1].decode()
    async with fleet.client.get(f"{second.url}/v1/streams/{disturbed}", headers={"last-event-id": last}) as response:
        assert response.status == 200, await response.text()
        rest = await response.read()
    assert rest
    cursors = CURSOR.findall(seen + rest)
    assert len(cursors) == len(set(cursors))
    assert comparable(seen + rest, disturbed) == comparable(undisturbed, whole)
