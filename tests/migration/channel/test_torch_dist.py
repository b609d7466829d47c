"""Gloo between the two ends of a channel, each in a thread of its own; NCCL differs by the backend's name (marked gpu)."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from migration.channel.base import Header, Inbox, Outbox
from migration.errors import ChannelError, ChannelTimeout, ChannelUnknown

torch = pytest.importorskip("torch", reason="the light environment has no torch")

from migration.channel.torch_dist import RendezvousStore, TorchChannel, join_remote  # noqa: E402  # after the skip

HOST = "127.0.0.1"
NO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each end")


@contextmanager
def opened(
    backend: str = "gloo", devices: tuple[str, str] = ("cpu", "cpu"), timeout_s: float = 20.0
) -> Iterator[tuple[TorchChannel, TorchChannel]]:
    """(source, destination) of one pair."""
    store = RendezvousStore(HOST, timeout_s)
    with ThreadPoolExecutor(2) as pool:
        source = pool.submit(store.join, backend, torch.device(devices[0]), HOST, timeout_s)
        destination = pool.submit(join_remote, store.address, backend, torch.device(devices[1]), HOST, timeout_s)
        ends = source.result(), destination.result()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def both(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in (pool.submit(first), pool.submit(second))]


@pytest.mark.parametrize(
    ("backend", "devices"),
    [("gloo", ("cpu", "cpu")), pytest.param("nccl", ("cuda:0", "cuda:1"), marks=[pytest.mark.gpu, NO_GPUS])],
)
def test_headers_and_chunks_arrive_as_they_were_sent(backend: str, devices: tuple[str, str]) -> None:
    with opened(backend, devices) as (source, destination):
        sent = torch.arange(1 << 20, dtype=torch.int32, device=devices[0]).to(torch.uint8)
        received = torch.zeros_like(sent, device=devices[1])

        half = len(sent) // 2
        both(
            lambda: Outbox(source).send(7, len(sent), [sent[:half], sent[half:]]),
            lambda: Inbox(destination).receive(7, len(sent), [received[:half], received[half:]]),
        )
        assert torch.equal(sent.cpu(), received.cpu())


def test_a_transfer_given_up_leaves_the_channel_sound() -> None:
    with opened() as (source, destination):
        chunk, received = torch.ones(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
        outbox, inbox = Outbox(source), Inbox(destination)

        def receive() -> None:
            with pytest.raises(ChannelError, match="given transfer 1 up"):
                inbox.receive(1, 10, [received])
            inbox.receive(2, 10, [received])

        def send() -> None:
            outbox.abort(1)
            outbox.send(2, 10, [chunk])

        both(send, receive)
        assert torch.equal(chunk, received)


def test_many_headers_keep_their_order() -> None:
    with opened() as (source, destination):
        headers = [Header(number, number + 1) for number in range(50)]

        def send() -> None:
            for header in headers:
                source.send_header(header)

        assert both(send, lambda: [destination.receive_header() for _ in headers])[1] == headers


def test_a_receiver_whose_peer_closes_gets_an_error_and_does_not_hang() -> None:
    with opened() as (source, destination):
        waiting = threading.Event()

        def receive() -> str:
            waiting.set()
            with pytest.raises(ChannelError):
                destination.receive_header()
            return "failed as it must"

        def leave() -> None:
            waiting.wait()
            source.close()

        with ThreadPoolExecutor(2) as pool:
            outcome = pool.submit(receive)
            pool.submit(leave).result()
            assert outcome.result(timeout=40) == "failed as it must"


def test_a_receiver_without_a_sender_gives_up_at_its_deadline() -> None:
    with opened(timeout_s=0.3) as (_, destination), pytest.raises(ChannelTimeout):
        destination.receive_header()


def test_nobody_joins() -> None:
    with pytest.raises(ChannelError):
        RendezvousStore(HOST, 0.3).join("gloo", torch.device("cpu"), HOST, 0.3)


def test_the_second_to_join_is_told_at_once_that_the_channel_is_anothers() -> None:
    """An instance that was started again is offered what its predecessor had; to set up a group would take the whole deadline."""
    store = RendezvousStore(HOST, 5)
    cpu = torch.device("cpu")
    with ThreadPoolExecutor() as threads:
        here = threads.submit(store.join, "gloo", cpu, HOST, 5)
        there = join_remote(store.address, "gloo", cpu, HOST, 5)
        with closing(here.result()), closing(there), pytest.raises(ChannelUnknown):
            join_remote(store.address, "gloo", cpu, HOST, 5)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ChannelError, match="carrier-pigeon"):
        RendezvousStore(HOST, 1).join("carrier-pigeon", torch.device("cpu"), HOST, 1)
