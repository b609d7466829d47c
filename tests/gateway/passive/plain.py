"""A plain OpenAI server as a passive backend: scripted, on a port that it can leave and take again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.gateway.scripted import Exchange, Script, ScriptedBackend, chunk

ANSWER = b"".join([chunk("a"), chunk("b"), chunk(None, "stop"), b"data: [DONE]\n\n"])

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 200.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100",odd="a\\"b, c=\\\\"} 1.0
"""


@dataclass(eq=False)
class PlainServer:
    """`backend.others` holds its routes; `start` and `stop` as a process that comes and dies."""

    backend: ScriptedBackend
    models: tuple[str, ...] = ("m",)
    metrics: str | None = METRICS
    health: int = 200
    port: int = 0
    server: asyncio.Server | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.backend.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """What has been accepted already gets its connection first: closed in between, asyncio forgets to close it."""
        if self.server is not None:
            loop = asyncio.get_running_loop()
            for listener in self.server.sockets:
                loop.remove_reader(listener.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self.server.close()

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(self.health, b"{}")

    async def _models(self, exchange: Exchange) -> None:
        cards = [{"id": name, "object": "model", "max_model_len": 2048} for name in self.models]
        await exchange.answer(200, json.dumps({"object": "list", "data": cards}).encode())

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(404 if self.metrics is None else 200, (self.metrics or "none").encode())

    def routes(self) -> dict[str, Script]:
        return {"/health": self._health, "/v1/models": self._models, "/metrics": self._metrics}


@asynccontextmanager
async def plain_server(metrics: str | None = METRICS, models: tuple[str, ...] = ("m",)) -> AsyncIterator[PlainServer]:
    async def streams(exchange: Exchange) -> None:
        await exchange.stream(ANSWER)

    plain = PlainServer(ScriptedBackend("plain", script=streams), models, metrics)
    plain.backend.others = plain.routes()
    await plain.start()
    try:
        yield plain
    finally:
        await plain.stop()
    assert not plain.backend.failures
