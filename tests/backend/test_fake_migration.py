"""Two backends with fake engines over real HTTP: a request moves between them in mid-stream, and its client's bytes do not show it."""

import asyncio
import base64
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from backend.engine.fake.engine import build_fake_engine
from backend.engine.fake.settings import FakeSettings
from backend.llumlet.app import build
from backend.llumlet.settings import LlumletSettings
from backend.registry.memory import MemoryStore

STEP_S = 0.004
KV_BLOCK_BYTES = 2048
ENGINE: dict[str, object] = {
    "decode_base_s": STEP_S,
    "prefill_base_s": STEP_S,
    "max_model_tokens": 2048,
    "capacity_blocks": 256,
    "kv_bytes_per_block": KV_BLOCK_BYTES,
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me how they crossed the river. " * 20}],
    "max_tokens": 180,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
}


@dataclass(frozen=True)
class Backend:
    instance: str
    url: str
    http: httpx.AsyncClient

    async def load(self) -> dict[str, Any]:
        return dict((await self.http.get("/midstream/load")).json())

    async def wait_idle(self) -> None:
        async with asyncio.timeout(10):
            while True:
                load = await self.load()
                if load["free_tokens"] == load["capacity_tokens"] and not load["running"] + load["waiting"]:
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def backend_here(instance: str, **settings: object) -> AsyncIterator[Backend]:
    """In this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = build_fake_engine(FakeSettings.model_validate(ENGINE | settings), "127.0.0.1")
        app = build(engine, LlumletSettings(instance_id=instance, advertised_url=url), MemoryStore(asyncio.get_running_loop().time))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="warning", ws="none"))
        async with asyncio.TaskGroup() as group, httpx.AsyncClient(base_url=url, timeout=30) as http:
            group.create_task(server.serve(sockets=[listener]))
            await wait_healthy(http)
            try:
                yield Backend(instance, url, http)
            finally:
                server.should_exit = True


@asynccontextmanager
async def backend_process(instance: str) -> AsyncIterator[Backend]:
    """In one of its own."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    environment = os.environ | {f"MIDSTREAM_FAKE_{name.upper()}": str(value) for name, value in ENGINE.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backend", "--engine", "fake", "--port", str(port), "--instance-id", instance), env=environment
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            await wait_healthy(http)
            yield Backend(instance, url, http)
    finally:
        process.terminate()
        async with asyncio.timeout(20):
            await process.wait()


async def wait_healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


@dataclass
class Relay:
    """The least a gateway does: strips cursors, attaches when told `moving`, goes on there after `moved`."""

    request: str
    at: Backend
    fleet: Sequence[Backend]
    seen: tuple[int, int] = (-1, -1)
    token_ids: list[int] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    tokens: int = 0
    moves: int = 0

    async def run(self, path: str, body: dict[str, Any]) -> str:
        headers = {"x-midstream-request": self.request, "x-midstream-epoch": "0", "x-request-id": self.request}
        stream = self.at.http.stream("POST", path, json=body, headers=headers)
        epoch = 0
        while True:
            target: tuple[str, int] | None = None
            moved = False
            async with stream as answer:
                assert answer.status_code == 200
                async for event in _events(answer):
                    control = event.get("event")
                    if control == "midstream":
                        said = json.loads(event["data"])
                        if said["kind"] == "moving":
                            target = said["instance"], said["epoch"]
                        assert said["kind"] in ("moving", "moved", "kept", "head")
                        moved = moved or said["kind"] == "moved"
                    elif control == "midstream.answer":
                        said = json.loads(event["data"])
                        assert said["status"] == 200
                        self.data.append(base64.b64decode(said["body"]).decode())
                    else:
                        self._relay(event)
            if not moved:
                assert (self.data[-1] == "[DONE]") == body["stream"]
                return "\n".join(self.data)
            assert target is not None
            self.at = next(backend for backend in self.fleet if backend.instance == target[0])
            self.moves, epoch = self.moves + 1, target[1]
            stream = self.at.http.stream("GET", f"/midstream/streams/{self.request}", params={"epoch": epoch})

    def _relay(self, event: dict[str, str]) -> None:
        cursor, ids = event["id"].split(";")
        tokens, sub = (int(part) for part in cursor.split("."))
        if (tokens, sub) <= self.seen:
            return
        new = [int(token) for token in ids.split(",") if token]
        assert tokens - len(new) == self.tokens, "a gap"
        self.seen, self.tokens = (tokens, sub), tokens
        self.token_ids += new
        if "data" in event:
            self.data.append(event["data"])


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    event: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}


def undated(text: str) -> str:
    """Two runs do not start in the same second; within one, `created` must be one and the same."""
    assert len(set(re.findall(r'"created":(\d+)', text))) == 1
    return re.sub(r'"created":\d+', '"created":0', text)


async def order_move(relay: Relay, to: Backend, *, mode: str, after_tokens: int) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while relay.tokens < after_tokens:
            await asyncio.sleep(STEP_S)
    destination = {"instance": to.instance, "url": to.url}
    answer = await relay.at.http.post("/midstream/migrations", json={"request": relay.request, "destination": destination, "mode": mode})
    return dict(answer.json())


async def served(relay: Relay, body: dict[str, Any], orders: Callable[[Relay], Awaitable[None]] | None = None) -> str:
    async with asyncio.TaskGroup() as group:
        run = group.create_task(relay.run("/v1/chat/completions", body))
        if orders is not None:
            await orders(relay)
    return undated(run.result())


@asynccontextmanager
async def fleet(kind: Callable[[str], Any]) -> AsyncIterator[tuple[Backend, Backend]]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(kind("i1")), await stack.enter_async_context(kind("i2"))


@pytest.mark.parametrize("mode", ["live", "stop_copy", "recompute"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
async def test_a_move_in_mid_stream_does_not_show(mode: str, sampling: dict[str, Any]) -> None:
    async with fleet(backend_here) as (first, second):
        unmoved = await served(Relay("r", first, ()), BODY | sampling)
        moved = Relay("r", first, (first, second))

        async def orders(relay: Relay) -> None:
            outcome = await order_move(relay, second, mode=mode, after_tokens=60)
            assert (outcome["result"], outcome["reason"]) == ("moved", "")
            assert (outcome["bytes"] > 10 * KV_BLOCK_BYTES) == (mode != "recompute")

        assert await served(moved, BODY | sampling, orders) == unmoved
        assert moved.moves == 1
        assert len(moved.token_ids) == 180
        await first.wait_idle()
        await second.wait_idle()


async def test_a_plain_answer_moves_too() -> None:
    async with fleet(backend_here) as (first, second):
        body = BODY | {"stream": False, "seed": 3}
        unmoved = await served(Relay("r", first, ()), body)
        moved = Relay("r", first, (first, second))

        async def orders(relay: Relay) -> None:
            assert (await order_move(relay, second, mode="live", after_tokens=60))["result"] == "moved"

        assert await served(moved, body, orders) == unmoved
        assert moved.moves == 1
        assert json.loads(unmoved)["usage"]["completion_tokens"] == 180


async def test_between_processes_there_and_back_again_does_not_show() -> None:
    async with fleet(backend_process) as (first, second):
        body = BODY | {"seed": 5, "max_tokens": 300}
        unmoved = await served(Relay("r", first, ()), body)
        moved = Relay("r", first, (first, second))

        async def orders(relay: Relay) -> None:
            assert (await order_move(relay, second, mode="live", after_tokens=40))["result"] == "moved"
            async with asyncio.timeout(10):
                while relay.at is first:
                    await asyncio.sleep(STEP_S)
            assert (await order_move(relay, first, mode="live", after_tokens=90))["result"] == "moved"

        assert await served(moved, body, orders) == unmoved
        assert moved.moves == 2
        await first.wait_idle()
        await second.wait_idle()


async def test_several_choices_do_not_move_and_are_served() -> None:
    async with fleet(backend_here) as (first, second):
        body = BODY | {"n": 2, "seed": 1, "max_tokens": 100}

        async def orders(relay: Relay) -> None:
            outcome = await order_move(relay, second, mode="live", after_tokens=20)
            assert (outcome["result"], outcome["reason"]) == ("unmovable", "n")

        relay = Relay("r", first, (first, second))
        await served(relay, body, orders)
        assert relay.tokens == 200
        await first.wait_idle()


async def copying(
    first: Backend, second: Backend, group: asyncio.TaskGroup, body: dict[str, Any]
) -> tuple[asyncio.Task[str], asyncio.Task[Any]]:
    """A request being served and its slow move, far enough for memory to be held on both sides."""
    relay = Relay("r", first, (first, second))
    running = group.create_task(relay.run("/v1/chat/completions", body))
    moving = group.create_task(order_move(relay, second, mode="live", after_tokens=30))
    async with asyncio.timeout(10):
        while (load := await second.load())["free_tokens"] == load["capacity_tokens"]:
            await asyncio.sleep(0.01)
    return running, moving


async def test_a_client_that_leaves_in_mid_copy_frees_both_sides() -> None:
    slow = partial(backend_here, copy_bytes_per_s=10_000, decode_base_s=0.02)
    async with fleet(slow) as (first, second), asyncio.TaskGroup() as group:
        running, moving = await copying(first, second, group, BODY)
        running.cancel()
        assert (await moving)["result"] == "ended"
        async with asyncio.timeout(5):
            await first.wait_idle()
            await second.wait_idle()


async def test_a_request_that_finishes_in_mid_copy_is_served_to_its_end() -> None:
    slow = partial(backend_here, copy_bytes_per_s=10_000, decode_base_s=0.02)
    async with fleet(slow) as (first, second), asyncio.TaskGroup() as group:
        short = BODY | {"max_tokens": 60, "temperature": 0}
        unmoved = await served(Relay("r", first, ()), short)
        running, moving = await copying(first, second, group, short)
        assert undated(await running) == unmoved
        assert (await moving)["result"] == "ended"
        await first.wait_idle()
        await second.wait_idle()


async def test_a_destination_without_memory_refuses_and_the_source_goes_on() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(backend_here("i1"))
        full = await stack.enter_async_context(backend_here("i2", capacity_blocks=130, watermark=0.9))
        unmoved = await served(Relay("r", first, ()), BODY | {"seed": 2})

        async def orders(relay: Relay) -> None:
            outcome = await order_move(relay, full, mode="live", after_tokens=30)
            assert (outcome["result"], outcome["reason"]) == ("refused", "no_memory")

        assert await served(Relay("r", first, (first, full)), BODY | {"seed": 2}, orders) == unmoved
        await first.wait_idle()
        await full.wait_idle()
