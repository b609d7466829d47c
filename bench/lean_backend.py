"""A fast fake backend for measuring what stands in front of it: an OpenAI server on a bare asyncio protocol.

`python -m bench.lean_backend --port P`. Streams `max_tokens` events at `--rate` per second and stream; answers everything else at once.
With `--redis` it reports itself as a backend with a llumlet would, and puts cursors before its events when asked by a gateway.
"""

import argparse
import asyncio
import base64
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop

from backend.registry.instance import InstanceState, LoadReport
from backend.registry.redis import RedisStore
from migration.leg import InstanceId

MODEL = "bench"
REPORT_INTERVAL_S = 0.25
REPORT_TTL_S = 10.0

_STREAMS = re.compile(rb'"stream"\s*:\s*true')
_LIMIT = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_DONE = b"data: [DONE]\n\n"
_PLAIN = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 60}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 60, "total_tokens": 69},
    }
).encode()
_METRICS = b"""\
vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100000"} 1
"""


def event(number: int) -> bytes:
    """One token's event, as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    shown = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(shown, separators=(",", ":")).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class Script:
    """What every stream of one server says, framed once for all of them. `plain` and `cursors` have the same events."""

    interval_s: float
    plain: tuple[bytes, ...]
    cursors: tuple[bytes, ...]


def script_of(rate: float, longest: int) -> Script:
    """Streams of up to `longest` events at `rate` per second."""
    events = [event(number) for number in range(1, longest + 1)]
    cursors = [b"id: %d.0;%d\n%s" % (number, 1000 + number, each) for number, each in enumerate(events, 1)]
    return Script(1 / rate, tuple(framed(each) for each in events), tuple(framed(each) for each in cursors))


class Connection(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._has_cursors = False
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    # ------------------------------------------------------------------ called by the parser

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_cursors = self._has_cursors or name.lower() == b"x-midstream-request"

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url, body, has_cursors = self._url, b"".join(self._body), self._has_cursors
        self._begin()
        if url.startswith((b"/v1/chat/completions", b"/v1/completions")):
            # A body of megabytes is not to cost a parse here, and some proxies write the members in another order.
            ends = body[:400] + body[-400:]
            if _STREAMS.search(ends) and (limit := _LIMIT.search(ends)):
                self._stream(int(limit[1]), self._script.cursors if has_cursors else self._script.plain, has_cursors)
            elif has_cursors:
                self._answer_as_event()
            else:
                self._answer(200, _PLAIN)
        elif url.startswith(b"/v1/models"):
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "max_model_len": 4096}
            self._answer(200, json.dumps({"object": "list", "data": [card]}).encode())
        elif url.startswith(b"/metrics"):
            self._answer(200, _METRICS, b"text/plain")
        elif url.startswith((b"/health", b"/version")):
            self._answer(200, b'{"version":"0.32.0"}')
        else:
            self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes, kind: bytes = b"application/json") -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
        self._transport.write(head + body)

    def _answer_as_event(self) -> None:
        told = {"status": 200, "headers": [["content-type", "application/json"]], "body": base64.b64encode(_PLAIN).decode()}
        data = b"event: midstream.answer\ndata: " + json.dumps(told).encode() + b"\n\n"
        self._transport.write(_STREAM_HEAD + framed(data) + b"0\r\n\r\n")

    def _stream(self, count: int, events: tuple[bytes, ...], has_cursors: bool) -> None:
        self._transport.write(_STREAM_HEAD)
        started_s = self._loop.time()
        done = framed(b"id: %d.1;\n%s" % (count, _DONE) if has_cursors else _DONE) + b"0\r\n\r\n"

        def tick(number: int) -> None:
            if number == count:
                self._transport.write(done)
                return
            self._transport.write(events[number])
            self._timer = self._loop.call_at(started_s + (number + 1) * self._script.interval_s, tick, number + 1)

        tick(0)


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def report_of(instance: str, url: str, sequence: int) -> LoadReport:
    """An idle instance, as a llumlet would tell of it."""
    return LoadReport(
        instance=InstanceId(instance),
        incarnation="1",
        sequence=sequence,
        url=url,
        state=InstanceState.READY,
        models=(MODEL,),
        engine="bench",
        capacity_tokens=1_600_000,
        free_tokens=1_600_000,
        block_tokens=16,
        running=0,
        waiting=0,
        waiting_tokens=0,
        head_tokens=0,
        head_tier="",
        oldest_waiting_s=0.0,
        tiers=(),
        preemptions=0,
        migrations_in=0,
        migrations_out=0,
        max_batch=100_000,
        max_model_tokens=4096,
    )


async def publish(redis_url: str, instance: str, url: str, interval_s: float) -> None:
    """Report for ever."""
    store = RedisStore(redis_url)
    sequence = 0
    while True:
        sequence += 1
        await store.publish(report_of(instance, url, sequence), REPORT_TTL_S)
        await asyncio.sleep(interval_s)


async def serve(port: int, script: Script, redis_url: str | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    make: Callable[[], Connection] = lambda: Connection(script)  # noqa: E731  # a factory, not a function of its own
    server = await loop.create_server(make, "127.0.0.1", port, backlog=4096)
    async with asyncio.TaskGroup() as tasks:
        if redis_url is not None:
            tasks.create_task(publish(redis_url, f"bench-{port}", f"http://127.0.0.1:{port}", REPORT_INTERVAL_S))
        waiting = tasks.create_task(stopped.wait())
        await waiting
        server.close()
        raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Read flags, and serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.lean_backend", description="A fast fake OpenAI server.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=50.0, help="events per second and stream (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=10_000, help="most events of a stream (default: %(default)s)")
    parser.add_argument("--redis", metavar="URL", help="report there, and speak with cursors")
    options = parser.parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options.port, script_of(options.rate, options.longest), options.redis))
    except* SystemExit:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
