"""Real backends with modelled engines and real gateways, over real HTTP, all in the test's own process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx

from backend.engine.fake.engine import FakeEngine, build_fake_engine
from backend.engine.fake.settings import FakeSettings
from backend.llumlet.app import build
from backend.llumlet.settings import LlumletSettings
from backend.registry.store import InstanceStore
from gateway.app import build_app
from gateway.policy.config import Policy
from gateway.policy.dispatch import LeastLoaded
from gateway.settings import GatewaySettings
from tests.backend.llumlet.live import serving
from tests.gateway.conftest import live, until

ENGINE = {
    "capacity_blocks": 128,
    "max_model_tokens": 2048,
    "prefix_cache": False,
    "decode_base_s": 0.03,
    "prefill_base_s": 0.005,
    "prefill_per_token_s": 1e-5,
    "eos_one_in": 0,
}


@dataclass(frozen=True, slots=True)
class Site:
    """One backend."""

    instance: str
    url: str
    engine: FakeEngine


@asynccontextmanager
async def site(instance: str, store: InstanceStore, **engine: object) -> AsyncIterator[Site]:
    fake = build_fake_engine(FakeSettings.model_validate({**ENGINE, **engine}), "127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = build(fake, LlumletSettings(instance_id=instance, advertised_url=url), store)
    async with serving(app, listener):
        yield Site(instance, url, fake)


@asynccontextmanager
async def gateway(store: InstanceStore, moving: Policy | None = None, **settings: object) -> AsyncIterator[str]:
    made = GatewaySettings.model_validate({"keepalive_interval_s": 0, **settings})
    async with live(build_app(made, store, LeastLoaded(), moving)) as url:
        yield url


@dataclass(eq=False)
class Stream:
    """One request, read to its end by a task of its own."""

    name: str
    events: int = 0
    text: bytes = b""
    done: bool = False
    status: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, url: str, prompt_tokens: int, max_tokens: int, tier: str = "normal") -> None:
        body = {"model": "fake", "prompt": [7] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 3}
        headers = {"x-request-id": self.name, "priority": tier}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer,
        ):
            self.status = answer.status_code
            async for chunk in answer.aiter_raw():
                self.text += chunk
                self.events += chunk.count(b"data: ")
                self.started.set()
        self.done = True


@dataclass(eq=False)
class Fleet:
    """Two backends and their store."""

    store: InstanceStore
    sites: tuple[Site, Site]
    tasks: asyncio.TaskGroup
    streams: list[Stream] = field(default_factory=list)

    def ask(self, url: str, name: str, prompt_tokens: int, max_tokens: int, tier: str = "normal") -> Stream:
        stream = Stream(name)
        self.streams.append(stream)
        self.tasks.create_task(stream.read(url, prompt_tokens, max_tokens, tier))
        return stream

    async def fill(self, url: str, prompt_tokens: int, max_tokens: int) -> list[Stream]:
        """Two requests on each instance, running."""
        streams = []
        for number in range(4):
            streams.append(self.ask(url, f"short-{number}", prompt_tokens, max_tokens))
            await until(streams[-1].started.is_set)
        for each in self.sites:
            assert each.engine.load().running == 2
        return streams


@asynccontextmanager
async def fleet(store: InstanceStore, **engine: object) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(site("i1", store, **engine))
        second = await stack.enter_async_context(site("i2", store, **engine))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        yield Fleet(store, (first, second), tasks)


async def metrics(url: str) -> dict[str, float]:
    """What a gateway counts: the value of each sample, by its line's beginning."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"{url}/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
