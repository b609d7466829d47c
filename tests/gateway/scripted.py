"""A backend that does, byte by byte, what a test tells it: docs/wire.md over raw sockets, with every fault a process can have."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SSE = (("content-type", "text/event-stream; charset=utf-8"),)
JSON = (("content-type", "application/json"),)


@dataclass(eq=False)
class Exchange:
    """One request and the answer being written to it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: bool = False

    async def head(self, status: int = 200, headers: Sequence[tuple[str, str]] = SSE) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            *(f"{name}: {value}" for name, value in headers),
            "transfer-encoding: chunked",
            "connection: close",
        ]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send(self, *parts: bytes) -> None:
        """One HTTP chunk, one packet, for each part."""
        for part in parts:
            await self.raw(b"%x\r\n%s\r\n" % (len(part), part))

    async def end(self) -> None:
        self.ended = True
        await self.raw(b"0\r\n\r\n")

    async def answer(self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = JSON) -> None:
        await self.head(status, headers)
        await self.send(body)
        await self.end()

    async def stream(self, *parts: bytes) -> None:
        await self.head()
        await self.send(*parts)
        await self.end()

    def cut(self) -> None:
        """Die: the connection is reset."""
        self.ended = True
        self.writer.transport.abort()

    async def wait_left(self) -> None:
        """Return when the other side has closed the connection."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass


Script = Callable[[Exchange], Awaitable[None]]


@dataclass(eq=False)
class ScriptedBackend:
    """`script` answers completions; `others` answers targets that begin with its keys. `seen` is what was asked, in order."""

    id: str
    url: str = ""
    script: Script | None = None
    others: dict[str, Script] = field(default_factory=dict)
    seen: list[Exchange] = field(default_factory=list)
    open: int = 0
    """Connections being served right now."""
    failures: list[BaseException] = field(default_factory=list)

    def asked(self, prefix: str) -> list[Exchange]:
        return [exchange for exchange in self.seen if exchange.target.startswith(prefix)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            exchange = await _read_request(reader, writer)
            self.seen.append(exchange)
            script = next((script for prefix, script in self.others.items() if exchange.target.startswith(prefix)), self.script)
            if script is None:
                await exchange.answer(404, b'{"error":{"message":"unknown"}}')
            else:
                await script(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001  # the root of a task: shown by the fixture
            self.failures.append(error)
        finally:
            self.open -= 1
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.split("\r\n")
    method, target, _ = line.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest if one)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Exchange(method, target, headers, body, reader, writer)


@asynccontextmanager
async def scripted_backend(name: str) -> AsyncIterator[ScriptedBackend]:
    backend = ScriptedBackend(name)
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    backend.url = f"http://{host}:{port}"
    try:
        yield backend
    finally:
        server.close()
    assert not backend.failures


def event(tokens: int, sub: int, ids: Sequence[int], data: bytes) -> bytes:
    """An event's bytes behind its cursor."""
    return b"id: %d.%d;%s\n%s" % (tokens, sub, ",".join(map(str, ids)).encode(), data)


def control(**fields: object) -> bytes:
    return b"event: midstream\ndata: " + json.dumps(fields).encode() + b"\n\n"


def moving(epoch: int, to: ScriptedBackend) -> bytes:
    return control(kind="moving", epoch=epoch, instance=to.id, url=to.url)


def head_of_attachment() -> bytes:
    return control(kind="head", status=200, headers=SSE)


def answer_event(body: bytes, status: int = 200) -> bytes:
    answer = {"status": status, "headers": JSON, "body": base64.b64encode(body).decode()}
    return b"event: midstream.answer\ndata: " + json.dumps(answer).encode() + b"\n\n"


WORDS = ("Once", " naïve", " 🦛", " 漢字", " [DONE]", " data: [DONE]\n\n", " x", "\r\n", ".")


def chunk(text: str | None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    body = {
        "id": "chatcmpl-r",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def told(words: Sequence[str] = WORDS) -> list[bytes]:
    """A whole streamed answer as a backend sends it: role, one event a token, a finish, a usage chunk, the end mark."""
    events = [event(1, 0, (101,), chunk(""))]
    events += [event(n, int(n == 1), (100 + n,) if n > 1 else (), chunk(word)) for n, word in enumerate(words, start=1)]
    last = len(words)
    events.append(event(last, 1 + int(last == 1), (), chunk(None, "stop")))
    events.append(event(last, 2 + int(last == 1), (), b"data: [DONE]\n\n"))
    return events


def shown(events: Sequence[bytes]) -> bytes:
    """What the client must get of them."""
    return b"".join(one.split(b"\n", 1)[1] for one in events)


def named(kind: str, **fields: object) -> bytes:
    """An event of an API that names its events."""
    body = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


def told_message(words: Sequence[str] = WORDS) -> list[bytes]:
    """A whole streamed answer of Anthropic's API."""
    start = named("message_start", message={"id": "chatcmpl-r", "content": [], "usage": {"input_tokens": 3, "output_tokens": 0}})
    events = [
        event(1, 0, (101,), start),
        event(1, 1, (), named("content_block_start", index=0, content_block={"type": "text", "text": ""})),
    ]
    for n, word in enumerate(words, start=1):
        added = named("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        events.append(event(n, 2 if n == 1 else 0, (100 + n,) if n > 1 else (), added))
    ends = (named("content_block_stop", index=0), named("message_delta", delta={"stop_reason": "end_turn"}), named("message_stop"))
    return [*events, *(event(len(words), sub, (), end) for sub, end in enumerate(ends, start=1))]


def told_response(words: Sequence[str] = WORDS) -> list[bytes]:
    """A whole streamed answer of the responses API, whose first events come before any token."""
    response = {"id": "resp_0123456789abcdef", "created_at": 1, "output": []}
    events = [event(0, sub, (), named(kind, response=response)) for sub, kind in enumerate(("response.created", "response.in_progress"))]
    events.append(event(1, 0, (101,), named("response.output_item.added", item={"id": "msg_0123456789abcdef"})))
    for n, word in enumerate(words, start=1):
        events.append(event(n, int(n == 1), (100 + n,) if n > 1 else (), named("response.output_text.delta", delta=word)))
    ends = (named("response.output_text.done", text="".join(words)), named("response.completed", response=response))
    return [*events, *(event(len(words), sub, (), end) for sub, end in enumerate(ends, start=1))]
