"""A backend with a modelled engine drains while requests run and wait in it: all go, with the real session, over real HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from backend.engine.fake.engine import build_fake_engine
from backend.engine.fake.settings import FakeSettings
from backend.llumlet.app import build
from backend.llumlet.settings import LlumletSettings
from backend.registry.memory import MemoryStore
from tests.backend.llumlet.live import DEADLINE_S, serving, wait_until
from tests.backend.llumlet.test_two_backends import Site, events, spliced, without_created

REQUESTS = ("R1", "R2", "R3", "R4")


@asynccontextmanager
async def site(instance: str, store: MemoryStore, client: httpx.AsyncClient, max_batch: int) -> AsyncIterator[Site]:
    engine = build_fake_engine(FakeSettings.model_validate({"decode_base_s": 0.004, "max_batch": max_batch}), "127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = build(engine, LlumletSettings(instance_id=instance, advertised_url=url), store)
    async with serving(app, listener):
        yield Site(instance, url, engine, app, client)


async def test_running_and_waiting_requests_leave_and_go_on() -> None:
    async with AsyncExitStack() as stack:
        store = MemoryStore(asyncio.get_running_loop().time)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=DEADLINE_S))
        here = await stack.enter_async_context(site("i1", store, client, max_batch=2))
        there = await stack.enter_async_context(site("i2", store, client, max_batch=8))
        async with there.chat(stream=True, request="R0") as reader:
            unmoved = await reader.rest()

        async def serve(request: str) -> bytes:
            """As a gateway does: read to the last word, then go on at the destination."""
            async with here.chat(stream=True, request=request) as before:
                first = await before.rest()
            epoch = first.rpartition(b'{"kind":"moved","epoch":')[2].partition(b"}")[0].decode()
            async with client.stream("GET", f"{there.url}/midstream/streams/{request}?epoch={epoch}") as after:
                assert after.status_code == 200
                return spliced(first, await after.aread())

        async with asyncio.TaskGroup() as group:
            served = {request: group.create_task(serve(request)) for request in REQUESTS}
            await wait_until(lambda: here.engine.load().running == 2 and here.engine.load().waiting == 2)
            here.app.drain.begin()
            await wait_until(lambda: len(here.app.flights) == 0)
            assert here.engine.load().free_tokens == here.engine.load().capacity_tokens
        wanted = b"".join(event for _, event in events(unmoved))
        for request, task in served.items():
            assert without_created(task.result()).replace(request.encode(), b"R0") == without_created(wanted)
