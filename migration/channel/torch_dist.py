"""KV blocks over torch.distributed: one two-rank process group for each pair of workers and direction. NCCL and Gloo differ by name only.

The source's worker hosts the rendezvous store, so that no group ever spans the fleet. The group is ours alone: torch's default group
(the engine's) is not touched. All calls block and belong in a worker thread; each has a deadline, after which the pair is dead
and must be closed. On GPUs everything runs on a stream of our own.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from migration.channel.base import HEADER_BYTES, Header
from migration.errors import ChannelError, ChannelTimeout, ChannelUnknown

SOURCE_RANK, DESTINATION_RANK = 0, 1
_JOINED = "midstream-joined"
"""In the store: how many destinations have come. A rendezvous is good for one."""


class RendezvousStore:
    """The source's side of a rendezvous: a TCP store on a free port. `address` is 'host:port' for the destination."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._store = dist.TCPStore(host, 0, 2, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"

    def join(self, backend: str, device: torch.device, local_host: str, timeout_s: float) -> "TorchChannel":
        """Wait for the destination and open the channel. Raises ChannelError."""
        return _join(self._store, SOURCE_RANK, backend, device, local_host, timeout_s)


def join_remote(address: str, backend: str, device: torch.device, local_host: str, timeout_s: float) -> "TorchChannel":
    """The destination's side: join the source's store and open the channel. Raises ChannelError; ChannelUnknown where another process has
    joined before: an instance that was started again is offered what its predecessor had."""
    host, _, port = address.rpartition(":")
    with _translated("cannot reach the source's store"):
        store = dist.TCPStore(host, int(port), 2, is_master=False, timeout=timedelta(seconds=timeout_s))
        joined = store.add(_JOINED, 1)
    if joined > 1:
        raise ChannelUnknown("somebody else has joined this channel")
    return _join(store, DESTINATION_RANK, backend, device, local_host, timeout_s)


def _join(store: dist.TCPStore, rank: int, backend: str, device: torch.device, local_host: str, timeout_s: float) -> "TorchChannel":
    timeout = timedelta(seconds=timeout_s)
    with _translated(f"cannot set up {backend}"):
        prefixed = dist.PrefixStore("midstream", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group: dist.ProcessGroup = dist.ProcessGroupNCCL(prefixed, rank, 2, options)
        elif backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
            gloo._timeout = timeout
            group = dist.ProcessGroupGloo(prefixed, rank, 2, gloo)
        else:
            raise ChannelError(f"no such channel backend: {backend!r}")
    return TorchChannel(group, store, rank, device, timeout_s)


class TorchChannel:
    """One open pair, as a KVChannel of tensors. Sends if it is the source, receives if it is the destination. One user at a time."""

    def __init__(self, group: dist.ProcessGroup, store: dist.TCPStore, rank: int, device: torch.device, timeout_s: float) -> None:
        self._open_group: dist.ProcessGroup | None = group
        self._store = store  # must outlive the group
        self._peer = DESTINATION_RANK if rank == SOURCE_RANK else SOURCE_RANK
        self._timeout_s = timeout_s
        self._sending: dist.Work | None = None
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)

    def send_header(self, header: Header) -> None:
        self.drain()
        with self.on_stream(), _translated("cannot send"):
            self._header.copy_(torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8))
            self._wait(self._group.send([self._header], self._peer, 0))

    def send_chunk(self, chunk: torch.Tensor) -> None:
        """Start sending a contiguous tensor, and wait for the one before."""
        with self.on_stream(), _translated("cannot send"):
            work = self._group.send([chunk], self._peer, 0)
        self.drain()
        self._sending = work

    def drain(self) -> None:
        work, self._sending = self._sending, None
        if work is not None:
            with self.on_stream(), _translated("the transfer failed"):
                self._wait(work)

    def receive_header(self) -> Header:
        with self.on_stream(), _translated("cannot receive"):
            self._wait(self._group.recv([self._header], self._peer, 0))
            return Header.from_bytes(self._header.cpu().numpy().tobytes())

    def receive_chunk(self, into: torch.Tensor) -> None:
        """Fill a contiguous tensor."""
        with self.on_stream(), _translated("the transfer failed"):
            self._wait(self._group.recv([into], self._peer, 0))

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Run GPU work of this channel on its own stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def settle(self) -> None:
        """Wait for the GPU work enqueued on the channel's stream."""
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """Tear the pair down; a peer blocked in it gets an error."""
        group, self._open_group = self._open_group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._open_group is None:
            raise ChannelError("the channel is closed")
        return self._open_group

    def _wait(self, work: dist.Work) -> None:
        if not work.wait(timedelta(seconds=self._timeout_s)):
            raise ChannelTimeout("the peer did not answer within the deadline")
        self.settle()


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing narrower on every version
        text = str(error)
        kind = ChannelTimeout if "imeout" in text or "imed out" in text else ChannelError
        raise kind(f"{what}: {text.splitlines()[0] if text else error!r}") from error
