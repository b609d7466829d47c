"""Two real vLLM engines, their llumlets and a gateway, served over real sockets from one test process, so that a test can hold a
migration wherever it wants: the engines' schedulers and workers are processes of their own, the HTTP sides share the test's event loop."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.engine.flight import Flight
from backend.engine.vllm.engine import VllmEngine
from backend.engine.vllm.server import open_engine, parse
from backend.engine.vllm.settings import KVSettings
from backend.llumlet.app import BackendApp, build
from backend.llumlet.settings import LlumletSettings
from backend.registry.memory import MemoryStore
from backend.registry.store import Candidate
from deploy.settings import DeploySettings
from deploy.tiny_model import ensure_tiny_model
from gateway.app import build_app
from gateway.policy.dispatch import LeastLoaded
from gateway.policy.view import ClusterView, RequestView
from gateway.settings import GatewaySettings
from migration.leg import InstanceId, Leg, RequestId
from tests.backend.engine.vllm.paced import paced_id

HOST = "127.0.0.1"
MODEL = "tiny"
BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 1024
CAPACITY_BLOCKS = 128
QUIET_S = 20.0
PACE_S = 0.01
"""What is added to each step of a request that is to move."""
RESUME = "/midstream/resume"
NAME = re.compile(rb"(chatcmpl-tool-|(?:resp|msg|rs|fc)_)[0-9a-f]{16}")
CURSOR = re.compile(rb"^id: (\d+)\.", re.MULTILINE)


@dataclass(eq=False)
class PeerMail:
    """Sits before a backend and can lose or hold the messages of its peer."""

    app: ASGIApp
    lose_answers_to: dict[str, int] = field(default_factory=dict)
    """Message kind: how many answers are still to be lost (the message itself is handled)."""
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    """Message kind: an event that must be set before the message is handed on."""
    held: int = 0
    """Messages being held right now."""
    cut_at: int | None = None
    """The next answer that has so many tokens is cut off there, and its engine hears that its client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (scope["path"].startswith("/v1/") or scope["path"] == RESUME):
            await self._answer(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] != "/midstream/messages":
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        message = json.loads(body)
        if message["kind"] in self.hold:
            self.held += 1
            try:
                await self.hold[message["kind"]].wait()
            finally:
                self.held -= 1
        lost = self.lose_answers_to.get(message["kind"], 0)
        if lost:
            self.lose_answers_to[message["kind"]] = lost - 1
        sent = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(sent, None) or await receive()

        await self.app(scope, replay, _refuse_to_send if lost else send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Uvicorn cuts the connection of an answer that was left unfinished."""
        cut = asyncio.Event()

        async def send_until_cut(message: Message) -> None:
            cursors = CURSOR.findall(message.get("body", b""))
            if self.cut_at is not None and any(int(tokens) >= self.cut_at for tokens in cursors):
                self.cut_at = None
                cut.set()
            if not cut.is_set():
                await send(message)

        async def hear() -> Message:
            return await receive()

        async def receive_until_cut() -> Message:
            async with asyncio.TaskGroup() as group:
                gone = group.create_task(cut.wait())
                message = group.create_task(hear())
                await asyncio.wait([gone, message], return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                message.cancel()
            return {"type": "http.disconnect"} if message.cancelled() else message.result()

        await self.app(scope, receive_until_cut, send_until_cut)


async def _refuse_to_send(message: Message) -> None:
    if message["type"] == "http.response.start":
        raise ConnectionAbortedError("the test loses this answer")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


@dataclass(eq=False)
class Instance:
    """One engine with its llumlet."""

    id: InstanceId
    url: str
    engine: VllmEngine
    mail: PeerMail
    backend: BackendApp

    @property
    def free_tokens(self) -> int:
        return self.engine.load().free_tokens

    def flights(self) -> list[Flight]:
        return list(self.engine._flights.values())

    @contextmanager
    def freezing_at(self, output_tokens: int) -> Iterator[None]:
        """Let no request be frozen before it has that many output tokens."""
        real = self.engine.freeze

        async def freeze(leg: Leg) -> Any:
            flight = self.engine.flight(leg)
            if flight is not None:
                await flight.wait_history(output_tokens)
            return await real(leg)

        with replaced(self.engine, "freeze", freeze):
            yield

    @contextmanager
    def sending(self, before: Callable[[Leg, int], Awaitable[None]]) -> Iterator[None]:
        """Call `before(leg, transfer)` before each transfer leaves this instance."""
        real = self.engine.send_blocks

        async def send_blocks(leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
            if end_block > first_block:  # an empty range calls a transfer off
                await before(leg, transfer)
            return await real(leg, peer, transfer, first_block, end_block)

        with replaced(self.engine, "send_blocks", send_blocks):
            yield


@contextmanager
def replaced(target: object, name: str, value: object) -> Iterator[None]:
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)


@dataclass(eq=False)
class Answer:
    """What a client got, byte for byte."""

    request: RequestId
    instance: InstanceId
    status: int
    body: bytes
    outcome: dict[str, Any] | None = None

    @property
    def comparable(self) -> bytes:
        """The bytes without what differs between any two runs: the request's id, the second of creation, and random names, for each
        of which stands its number."""
        same = self.body.replace(self.request.encode(), b"R")
        names: dict[bytes, bytes] = {}

        def number(found: re.Match[bytes]) -> bytes:
            return names.setdefault(found[0], b"%s%d" % (found[1], len(names)))

        return NAME.sub(number, re.sub(rb'"created(_at)?":\d+', b'"created":0', same))

    @property
    def created(self) -> set[bytes]:
        return set(re.findall(rb'"created(?:_at)?":(\d+)', self.body))

    @property
    def chunks(self) -> list[dict[str, Any]]:
        lines = self.body.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]

    @property
    def text(self) -> str:
        parts = [choice.get("text") or (choice.get("delta") or {}).get("content") or "" for c in self.chunks for choice in c["choices"]]
        return "".join(parts)


@dataclass
class Preferring:
    """The product's policy, but for one instance that comes first where it is a candidate at all."""

    preferred: InstanceId | None = None

    def order(self, request: RequestView, cluster: ClusterView, rng: Random) -> Sequence[Candidate]:
        order = LeastLoaded().order(request, cluster, rng)
        return sorted(order, key=lambda candidate: candidate.instance != self.preferred)


@dataclass(eq=False)
class Fleet:
    a: Instance
    b: Instance
    gateway: str
    client: httpx.AsyncClient
    policy: "Preferring"
    salt: int = 0

    def instance(self, id: str) -> Instance:
        return self.a if self.a.id == id else self.b

    def other(self, instance: Instance) -> Instance:
        return self.b if instance is self.a else self.a

    def next_request(self, pace_s: float = 0) -> RequestId:
        """A request id never used before: of the same length as all others, for comparing bytes."""
        self.salt += 1
        return RequestId(paced_id(pace_s, self.salt))

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        at: Instance | None = None,
        move_at: tuple[int, ...] = (),
        mode: str = "live",
        pace_s: float | None = None,
    ) -> Answer:
        """Send a request (to begin at that instance); order a move whenever it has as many output tokens as `move_at` says.

        `pace_s` is what its engine adds to each step: as a rule nothing, or what lets it live long enough to be moved.
        Returns when all is over.
        """
        request = self.next_request((PACE_S if move_at else 0) if pace_s is None else pace_s)
        self.policy.preferred = at.id if at is not None else None
        # Every run computes its own prompt: prefix hits change the shapes of the first step, and with them the last bit.
        sent = {"model": MODEL, "cache_salt": request, **body}
        outcome: dict[str, Any] | None = None
        async with asyncio.TaskGroup() as group:
            mover = group.create_task(self._move_at(request, move_at, mode)) if move_at else None
            async with self.client.stream("POST", self.gateway + path, json=sent, headers={"x-request-id": request}) as response:
                received = b"".join([chunk async for chunk in response.aiter_raw()])
                instance = InstanceId(response.headers.get("x-midstream-instance", ""))
                answer = Answer(request, instance, response.status_code, received)
            if mover is not None:
                outcome = await _within(mover, QUIET_S)
        answer.outcome = outcome
        return answer

    async def twice(self, path: str, body: Mapping[str, Any], *, move_at: tuple[int, ...], mode: str = "live") -> tuple[Answer, Answer]:
        """The same request moved and unmoved; checks that it did move, that both are equal, and that nothing is left held anywhere."""
        before = await self.settle()
        unmoved = await self.ask(path, body)
        moved = await self.ask(path, body, move_at=move_at, mode=mode)
        assert unmoved.status == moved.status == 200, (unmoved.body, moved.body)
        assert moved.outcome is not None
        assert moved.outcome["outcome"] == "moved", moved.outcome
        assert moved.comparable == unmoved.comparable
        assert await self.settle() == before
        return moved, unmoved

    async def _move_at(self, request: RequestId, positions: tuple[int, ...], mode: str) -> dict[str, Any]:
        outcome: dict[str, Any] = {}
        for position in positions:
            flight = await self.flight_of(request)
            await flight.wait_history(position)
            outcome = await self.move(request, mode)
        return outcome

    async def flight_of(self, request: RequestId) -> Flight:
        """The flight of the request, wherever it is now."""
        async with asyncio.timeout(QUIET_S):
            while True:
                for instance in (self.a, self.b):
                    for flight in instance.flights():
                        if (
                            flight.leg.request == request
                            and not flight.ended.is_set()
                            and (flight.replay is None or flight.replay.finished)
                        ):
                            return flight
                await asyncio.sleep(0.001)

    async def move(self, request: str, mode: str = "live", destination: str | None = None) -> dict[str, Any]:
        order = {"request": request, "mode": mode, **({"destination": destination} if destination else {})}
        response = await self.client.post(f"{self.gateway}/admin/migrations", json=order)
        return {"status": response.status_code, **response.json()}

    async def settle(self) -> tuple[int, int]:
        """Wait until nothing runs anywhere; free tokens of both engines."""
        full = (CAPACITY_BLOCKS - 1) * BLOCK_TOKENS
        async with asyncio.timeout(QUIET_S):
            while self.a.flights() or self.b.flights() or self.a.free_tokens != full or self.b.free_tokens != full:
                await asyncio.sleep(0.005)
        return self.a.free_tokens, self.b.free_tokens


@asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Serve an app on a real port of the loopback; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=port, log_level="warning", lifespan="on", timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        try:
            yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def open_fleet() -> AsyncIterator[Fleet]:
    """Start everything (about a minute); stop it again."""
    model = ensure_tiny_model(DeploySettings())
    store = MemoryStore(asyncio.get_running_loop().time)
    async with AsyncExitStack() as stack:
        instances = [await stack.enter_async_context(_instance(str(model), name, core, store)) for core, name in enumerate(("a", "b"))]
        settings = GatewaySettings(host=HOST, port=0, redis_url="memory://", rebalance=False)  # the tests order what moves
        policy = Preferring()
        url = await stack.enter_async_context(serving(build_app(settings, store, policy)))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        fleet = Fleet(instances[0], instances[1], url, client, policy)
        await _warm(fleet)
        yield fleet


@asynccontextmanager
async def _instance(model: str, name: str, core: int, store: MemoryStore) -> AsyncIterator[Instance]:
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[core % len(cores)])
    flags = [
        *("--model", model, "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", str(MAX_MODEL_TOKENS)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(CAPACITY_BLOCKS), "--max-num-seqs", "8"),
        *("--scheduling-policy", "priority"),
        *("--max-num-batched-tokens", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    port = free_port()
    url = f"http://{HOST}:{port}"
    async with open_engine(parse(flags), KVSettings(), HOST) as engine:
        backend = build(engine, LlumletSettings(instance_id=name, advertised_url=url), store)
        mail = PeerMail(backend)
        async with serving(mail, port):
            yield Instance(InstanceId(name), url, engine, mail, backend)


async def _within(mover: "asyncio.Task[dict[str, Any]]", seconds: float) -> dict[str, Any]:
    """What the mover says; after the stream's end it has little time left, for it may wait for tokens that never come."""
    done, _ = await asyncio.wait({mover}, timeout=seconds)
    if not done:
        mover.cancel()
        return {"outcome": "the request ended before it could be moved"}
    return mover.result()


async def _warm(fleet: Fleet) -> None:
    """The first use of anything is slow: of each engine, and of each channel."""
    for _ in range(2):
        await fleet.ask("/v1/completions", {"prompt": [5] * 40, "max_tokens": 600, "ignore_eos": True, "stream": True}, move_at=(4, 200))
        await fleet.settle()
