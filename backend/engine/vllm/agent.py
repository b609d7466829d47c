"""The KV agent: a thread in each of vLLM's worker processes that carries blocks, beside the engine's steps and never inside them.

It is brought in as vLLM's worker extension and started by one `collective_rpc`. The API process speaks to it over a Unix socket,
one connection an order (protocol: agent_wire.py), so that carrying blocks neither waits for a step nor holds one up.

Why that is safe: only blocks that are complete and settled are read while their request runs (the scheduler says which, after the
step that wrote them was processed); the last ones are read once the request is frozen and drained; only blocks of shells are
written, which no step reads or writes (scheduler.py, the fence).
"""

import contextlib
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from backend.engine.vllm import agent_wire as wire
from backend.engine.vllm.draws import seeded_generator
from backend.engine.vllm.kvblocks import KVBlocks
from migration.channel.base import ABORTED, OVERTAKEN, Inbox, Outbox
from migration.channel.torch_dist import RendezvousStore, TorchChannel, join_remote
from migration.errors import ChannelError, ChannelUnknown, MigrationError


class KVAgentExtension:
    """vLLM mixes this class into its worker class. One method, named so that it can clash with nothing."""

    def midstream_start_agent(self, config: dict[str, Any]) -> dict[str, Any]:
        """Start the agent of this rank. Called once, through collective_rpc; plain values in and out."""
        settings = msgspec.convert(config, wire.AgentSettings)
        worker: Any = self
        self.midstream_agent = KVAgent(worker.model_runner, worker.vllm_config, worker.rank, settings)
        return dict(msgspec.to_builtins(self.midstream_agent.started()))


class KVAgent:
    """Serves orders until the process ends."""

    def __init__(self, runner: Any, vllm_config: Any, rank: int, settings: wire.AgentSettings) -> None:
        self._runner = runner
        self._v2 = bool(vllm_config.use_v2_model_runner)
        self._rank = rank
        self._settings = settings
        num_blocks = int(runner.kv_cache_config.num_blocks)
        self._blocks = KVBlocks(runner.kv_caches, num_blocks)
        self._backend = "nccl" if self._blocks.device.type == "cuda" else "gloo"
        self._channels: dict[str, _Channel] = {}
        self._lock = threading.Lock()
        self._path = str(Path(settings.directory) / f"agent-{rank}")
        self._server = _Server(self._path, self.obey)
        threading.Thread(target=self._server.serve_forever, name="midstream-agent", daemon=True).start()

    def started(self) -> wire.Started:
        parts = self._blocks.parts
        return wire.Started(
            rank=self._rank,
            path=self._path,
            backend=self._backend,
            block_bytes=self._blocks.block_bytes,
            parts=len(parts),
            shape=self._blocks.shape,
            dtype=str(parts[0].dtype).removeprefix("torch."),
            unmovable=_why_uncarriable(self._runner.kv_cache_config.kv_cache_groups),
        )

    def obey(self, order: wire.Order) -> wire.Reply:
        """Carry out one order. Runs in a thread of its own; never raises."""
        try:
            match order:
                case wire.Offer():
                    return wire.Offered(self._offer(order))
                case wire.Accept():
                    return self._accept(order)
                case wire.Send():
                    return wire.Moved(self._channel(order.incarnation).send(order, self._blocks))
                case wire.Receive():
                    return wire.Moved(self._channel(order.incarnation).receive(order, self._blocks))
                case wire.ExportSampler():
                    return wire.Sampler(self._export_sampler(order.request))
                case wire.Adopt():
                    return self._adopt(order)
                case wire.Close():
                    return self._close(order.incarnation)
        except MigrationError as error:
            if isinstance(order, wire.Accept | wire.Send | wire.Receive) and error.reason not in (ABORTED, OVERTAKEN):
                self._close(order.incarnation)
            return wire.Refused(error.reason, str(error))
        except Exception as error:  # noqa: BLE001  # the root of this thread: the API process must hear of it
            return wire.Refused("agent", f"{type(error).__name__}: {error}")

    def _offer(self, order: wire.Offer) -> str:
        store = RendezvousStore(self._settings.host, self._settings.timeout_s)
        channel = _Channel(self._settings)
        with self._lock:
            self._channels[order.incarnation] = channel

        def join() -> None:
            channel.open(lambda: store.join(self._backend, self._blocks.device, self._settings.host, self._settings.timeout_s))

        threading.Thread(target=join, name="midstream-join", daemon=True).start()
        return store.address

    def _accept(self, order: wire.Accept) -> wire.Reply:
        with self._lock:
            channel = self._channels.get(order.incarnation)
            if channel is None:
                channel = self._channels[order.incarnation] = _Channel(self._settings)
                fresh = True
            else:
                fresh = False
        if fresh:
            channel.open(
                lambda: join_remote(order.address, self._backend, self._blocks.device, self._settings.host, self._settings.timeout_s)
            )
        channel.wait_open()
        return wire.Ok()

    def _channel(self, incarnation: str) -> "_Channel":
        with self._lock:
            channel = self._channels.get(incarnation)
        if channel is None:
            raise ChannelUnknown(f"no channel {incarnation}")
        return channel

    def _close(self, incarnation: str) -> wire.Reply:
        with self._lock:
            channel = self._channels.pop(incarnation, None)
        if channel is not None:
            channel.close()
        return wire.Ok()

    def _export_sampler(self, request: str) -> bytes:
        """The random state of a frozen request. V2 keys its draws by (seed, position): nothing to carry."""
        if self._v2:
            return b""
        state = self._runner.requests.get(request)
        if state is None or state.generator is None:
            return b""
        return bytes(state.generator.get_state().numpy().tobytes())

    def _adopt(self, order: wire.Adopt) -> wire.Reply:
        """Give the V1 runner the state it would have had of a request preempted here. V2 rebuilds it from the scheduler's data."""
        if self._v2:
            return wire.Ok()
        params = msgspec.msgpack.decode(order.sampling_params, type=SamplingParams)
        generator = None
        if order.sampler:
            generator = torch.Generator(device=self._blocks.device)
            generator.set_state(torch.frombuffer(bytearray(order.sampler), dtype=torch.uint8))
        elif order.draws and params.sampling_type == SamplingType.RANDOM_SEED:
            generator = seeded_generator(self._runner, params.seed, order.draws, self._blocks.device)
        self._runner.requests[order.request] = CachedRequestState(
            req_id=order.request,
            prompt_token_ids=order.prompt,
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=([],),  # the scheduler sends the table with the first step
            num_computed_tokens=order.computed_tokens,
            output_token_ids=list(order.output),
        )
        return wire.Ok()


def _why_uncarriable(groups: list[Any]) -> str:
    """One group of full attention is carried block by block. State that is no list of blocks (Mamba), or blocks that leave (sliding
    windows), would need rules of their own."""
    if len(groups) != 1:
        return "kv_groups"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window is not None:
        return "kv_kind"
    return ""


class _Channel:
    """One pair's end with its staging buffers. Transfers take turns."""

    def __init__(self, settings: wire.AgentSettings) -> None:
        self._settings = settings
        self._opened = threading.Event()
        self._failure: MigrationError | None = None
        self._channel: TorchChannel | None = None
        self._inbox: Inbox[torch.Tensor] | None = None
        self._staging: list[torch.Tensor] = []
        self._turn = threading.Lock()

    def open(self, join: Any) -> None:
        try:
            self._channel = join()
        except MigrationError as error:
            self._failure = error
        finally:
            self._opened.set()

    def wait_open(self) -> TorchChannel:
        if not self._opened.wait(self._settings.timeout_s):
            raise ChannelError("the channel did not open in time")
        if self._channel is None:
            raise self._failure or ChannelError("the channel did not open")
        return self._channel

    def send(self, order: wire.Send, blocks: KVBlocks) -> int:
        """Send these blocks; none at all tells the receiver that nothing comes."""
        channel = self.wait_open()
        with self._turn:
            if not order.blocks:
                Outbox(channel).abort(order.transfer)
                return 0
            total = len(order.blocks) * blocks.block_bytes
            Outbox(channel).send(order.transfer, total, self._gathered(channel, order.blocks, blocks))
            return total

    def receive(self, order: wire.Receive, blocks: KVBlocks) -> int:
        channel = self.wait_open()
        with self._turn:
            if self._inbox is None:
                self._inbox = Inbox(channel)
            total = len(order.blocks) * blocks.block_bytes
            self._inbox.receive(order.transfer, total, self._scattering(channel, order.blocks, blocks))
            return total

    def _gathered(self, channel: TorchChannel, ids: list[int], blocks: KVBlocks) -> Iterator[torch.Tensor]:
        """Gather the next chunk while the last one is on its way."""
        started_s, sent = time.monotonic(), 0
        for number, chunk in enumerate(self._chunks(ids, blocks)):
            buffer = self._buffer(number % 2, len(chunk), blocks)
            with channel.on_stream():
                blocks.gather(chunk, buffer)
            channel.settle()
            self._brake(sent, started_s)
            sent += buffer.numel()
            yield buffer

    def _scattering(self, channel: TorchChannel, ids: list[int], blocks: KVBlocks) -> Iterator[torch.Tensor]:
        for chunk in self._chunks(ids, blocks):
            buffer = self._buffer(0, len(chunk), blocks)
            yield buffer  # filled when the generator is resumed
            with channel.on_stream():
                blocks.scatter(chunk, buffer)
            channel.settle()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _chunks(self, ids: list[int], blocks: KVBlocks) -> list[list[int]]:
        size = self._chunk_blocks(blocks)
        return [ids[start : start + size] for start in range(0, len(ids), size)]

    def _chunk_blocks(self, blocks: KVBlocks) -> int:
        return max(1, self._settings.chunk_bytes // blocks.block_bytes)

    def _buffer(self, number: int, count: int, blocks: KVBlocks) -> torch.Tensor:
        while len(self._staging) <= number:
            size = self._chunk_blocks(blocks) * blocks.block_bytes
            self._staging.append(torch.empty(size, dtype=torch.uint8, device=blocks.device))
        return self._staging[number][: count * blocks.block_bytes]

    def _brake(self, sent: int, started_s: float) -> None:
        limit = self._settings.bytes_per_s
        if limit:
            ahead_s = sent / limit - (time.monotonic() - started_s)
            if ahead_s > 0:
                time.sleep(ahead_s)


class _Server(socketserver.ThreadingUnixStreamServer):
    """One thread a connection, one connection an order."""

    daemon_threads = True

    def __init__(self, path: str, obey: Any) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError, EOFError):
                    while True:
                        wire.write_blocking(self.wfile, wire.encode(obey(wire.decode_order(wire.read_blocking(self.rfile)))))

        super().__init__(path, Handler)
