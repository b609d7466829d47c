"""`midstream up` as a user runs it: instances are added and taken away while long streams run, and no stream shows it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.health import free_ports
from tests.e2e.answers import Answer, assert_same
from tests.e2e.fleet import HOST, found, until
from tests.e2e.test_scale_in import BACKENDS, PATH, STREAMS, TOKENS, body_of

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 120.0
SOON_S = 20.0


@dataclass(eq=False)
class Up:
    """A running `midstream up`, asked through its gateway alone."""

    url: str
    client: httpx.AsyncClient
    asked: int = 0

    async def get(self, path: str) -> Any:
        return (await self.client.get(self.url + path)).json()

    async def order(self, path: str, **fields: object) -> str:
        """Give an order; the id of its operation."""
        response = await self.client.post(f"{self.url}/admin/{path}", json=fields)
        assert response.status_code == 202, response.text
        return str(response.json()["operation"])

    async def ready(self) -> set[str]:
        return {one["id"] for one in (await self.get("/admin/instances"))["instances"] if one["state"] == "ready"}

    async def wait_over(self, operation: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            seen: dict[str, Any] = await self.get(f"/admin/operations/{operation}")
            return None if seen["state"] == "running" else seen

        return await found(over, READY_WITHIN_S)

    async def read(self, number: int) -> Answer:
        self.asked += 1
        answer = Answer(f"up-{self.asked:06d}")
        headers = {"x-request-id": answer.request}
        async with self.client.stream("POST", self.url + PATH, json={"model": "fake", **body_of(number)}, headers=headers) as got:
            answer.status, answer.headers = got.status_code, got.headers
            async for chunk in got.aiter_raw():
                answer.body += chunk
        answer.whole = True
        return answer


@asynccontextmanager
async def running_up(home: Path, **environment: str) -> AsyncIterator[Up]:
    [port] = free_ports(HOST, 1)
    command = [sys.executable, "-m", "deploy.cli", "up", "--engine", "fake", "--instances", "1", "--port", str(port)]
    log = home / "up.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env={**os.environ, **BACKENDS, "MIDSTREAM_HOME": str(home), **environment}, stdout=output, stderr=output
        )
    try:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            up = Up(f"http://{HOST}:{port}", client)

            async def is_ready() -> bool:
                assert process.returncode is None, log.read_text()
                return bool(await up.ready())

            await until(is_ready, READY_WITHIN_S)
            yield up
        process.terminate()
        assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def requests_on(up: Up) -> dict[str, str]:
    """Which instance serves each stream that has begun."""
    rows = (await up.get("/admin/requests"))["requests"]
    return {row["id"]: row["instance"] for row in rows if row["output_tokens"] >= 5}


async def test_instances_come_and_go_under_load(tmp_path: Path) -> None:
    async with running_up(tmp_path) as up:
        async with asyncio.TaskGroup() as group:
            undisturbed = [group.create_task(up.read(number)) for number in range(STREAMS)]
            grown = await up.wait_over(await up.order("scale-out", count=2))
        assert grown["state"] == "done"
        assert await up.ready() == {"i1", *(one["instance"] for one in grown["instances"])}

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(up.read(number)) for number in range(STREAMS)]

            async def all_run() -> bool:
                where = await requests_on(up)
                return len(where) == STREAMS and "i1" in where.values()

            await until(all_run, SOON_S)
            leaving = {request for request, instance in (await requests_on(up)).items() if instance == "i1"}
            operation = await up.order("scale-in", instance="i1")
            assert await up.order("scale-in", instance="i1") == operation
            over = await up.wait_over(operation)
            assert max(row["output_tokens"] for row in (await up.get("/admin/requests"))["requests"]) < TOKENS * 0.75
        assert over["state"] == "done"
        assert {(row["request"], row["result"]) for row in over["requests"]} == {(request, "moved") for request in leaving}
        assert [step["event"] for step in over["steps"]] == ["drain_ordered", "drained", "gone"]
        assert "i1" not in await up.ready()
        for stream, unmoved in zip(streams, undisturbed, strict=True):
            assert_same(stream.result(), unmoved.result())

        # By number: the newest of those that are idle.
        shrunk = await up.wait_over(await up.order("scale-in", count=1))
        assert [one["instance"] for one in shrunk["instances"]] == [grown["instances"][-1]["instance"]]
        assert await up.ready() == {grown["instances"][0]["instance"]}


async def test_a_rule_brings_the_fleet_to_its_least(tmp_path: Path) -> None:
    rule = '{"name": "demand", "min_instances": 2, "max_instances": 2, "cool_down_s": 600}'
    async with running_up(tmp_path, MIDSTREAM_AUTOSCALE=rule, MIDSTREAM_AUTOSCALE_INTERVAL_S="0.2") as up:

        async def is_grown() -> bool:
            return len(await up.ready()) == 2

        await until(is_grown, READY_WITHIN_S)
        (operation,) = (await up.get("/admin/operations"))["operations"]
        assert (operation["kind"], operation["origin"]) == ("scale_out", "autoscaler")
        assert (await up.wait_over(operation["id"]))["state"] == "done"
