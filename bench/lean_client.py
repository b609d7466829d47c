"""A load generator that costs little beside what it measures: bare asyncio protocols over httptools and uvloop, in a process of its own.

`python -m bench.lean_client` reads one Job from standard input and prints its Load.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import cast

import httptools
import uvloop


class Exchange(asyncio.Protocol):
    """One connection: sends a request, notes when each event of the answer came. May be used again when `done`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reset()

    def _reset(self) -> None:
        self.done: asyncio.Future[str] = self._loop.create_future()
        """The error, or nothing."""
        self.at_s: list[float] = []
        self.status = 0
        self.body_bytes = 0
        self._last = b""
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by type

    def ask(self, request: bytes) -> None:
        """Send it; `started_s` is now."""
        self._reset()
        self.started_s = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"nonsense: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection was closed")

    def on_status(self, status: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        events = (self._last + body).count(b"\n\n")
        self._last = body[-1:]
        if events:
            self.at_s += [time.perf_counter()] * events

    def on_message_complete(self) -> None:
        status = self.status or self._parser.get_status_code()
        self._end("" if status == 200 else f"status {status}")

    def _end(self, error: str) -> None:
        if not self.done.done():
            self.done.set_result(error)


@dataclass(slots=True)
class Load:
    """What one run of one scenario brought, in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    events: int = 0
    requests: int = 0
    wall_s: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario. With `events`: streams, `count` at once; without: plain requests, `concurrency` at a time."""

    port: int
    body: str
    count: int
    events: int = 0
    concurrency: int = 1
    deadline_s: float = 300.0


async def run_job(job: Job) -> Load:
    """The job, in a process of its own, which ends with this call."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.lean_client"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(job.deadline_s + 30):
            told, _ = await process.communicate(json.dumps(asdict(job)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Load(**json.loads(told))


def request_bytes(port: int, body: bytes) -> bytes:
    """One POST of a chat completion."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def run_streams(port: int, body: bytes, count: int, events: int, deadline_s: float) -> Load:
    """So many streams at once, each on a connection of its own, begun evenly over a second; `events` is what each must bring."""
    load = Load(requests=count)
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(_stream(port, body, number / count, events, deadline_s, load))
    load.wall_s = time.perf_counter() - began_s
    return load


async def _stream(port: int, body: bytes, delay_s: float, events: int, deadline_s: float, load: Load) -> None:
    await asyncio.sleep(delay_s)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            transport, exchange = await loop.create_connection(lambda: Exchange(loop), "127.0.0.1", port)
            try:
                exchange.ask(request_bytes(port, body))
                error = await exchange.done
            finally:
                transport.close()
    except (OSError, TimeoutError) as failure:
        load.errors.append(repr(failure))
        return
    load.events += len(exchange.at_s)
    if error or len(exchange.at_s) != events + 1:  # and the end mark
        load.errors.append(error or f"{len(exchange.at_s)} events in place of {events + 1}")
        return
    load.ttft_s.append(exchange.at_s[0] - exchange.started_s)
    load.gaps_s += [after - before for before, after in zip(exchange.at_s, exchange.at_s[1:-1], strict=False)]


async def run_requests(port: int, body: bytes, count: int, concurrency: int, deadline_s: float) -> Load:
    """So many requests, `concurrency` at a time, on connections that are kept."""
    load = Load(requests=count)
    left = iter(range(count))
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(_requests(port, request_bytes(port, body), left, deadline_s, load))
    load.wall_s = time.perf_counter() - began_s
    return load


async def _requests(port: int, request: bytes, left: Iterator[int], deadline_s: float, load: Load) -> None:
    loop = asyncio.get_running_loop()
    exchange: Exchange | None = None
    try:
        async with asyncio.timeout(deadline_s):
            for _ in left:  # one iterator, shared by all
                if exchange is None or exchange.transport.is_closing():
                    _, exchange = await loop.create_connection(lambda: Exchange(loop), "127.0.0.1", port)
                exchange.ask(request)
                error = await exchange.done
                load.latency_s.append(time.perf_counter() - exchange.started_s)
                if error:
                    load.errors.append(error)
    except (OSError, TimeoutError) as failure:
        load.errors.append(repr(failure))
    finally:
        if exchange is not None:
            exchange.transport.close()


async def _run(job: Job) -> Load:
    body = job.body.encode()
    if job.events:
        return await run_streams(job.port, body, job.count, job.events, job.deadline_s)
    return await run_requests(job.port, body, job.count, job.concurrency, job.deadline_s)


def main() -> int:
    """One job."""
    job = Job(**json.load(sys.stdin))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_run(job)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
