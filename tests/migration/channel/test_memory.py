"""The in-memory channel: two threads, and faults."""

import threading

import pytest

from migration.channel.base import Inbox, Outbox
from migration.channel.memory import MemoryChannel
from migration.errors import ChannelError, ChannelTimeout


def test_receiver_waits_for_the_sender() -> None:
    receiving = threading.Event()

    def fault(operation: str, ordinal: int) -> None:
        if operation == "receive_header":
            receiving.set()

    channel = MemoryChannel(fault=fault)
    into = bytearray(4)
    receiver = threading.Thread(target=lambda: Inbox(channel).receive(1, 4, [memoryview(into)]))
    receiver.start()
    assert receiving.wait(5)
    Outbox(channel).send(1, 4, [memoryview(b"abcd")])
    receiver.join(5)
    assert into == b"abcd"


def test_silence_is_a_timeout() -> None:
    with pytest.raises(ChannelTimeout):
        MemoryChannel(timeout_s=0.01).receive_header()


def test_close_frees_a_blocked_receiver() -> None:
    errors: list[Exception] = []
    receiving = threading.Event()
    channel = MemoryChannel(timeout_s=30, fault=lambda operation, ordinal: receiving.set())

    def receive() -> None:
        try:
            channel.receive_header()
        except ChannelError as error:
            errors.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    assert receiving.wait(5)
    channel.close()
    channel.close()
    receiver.join(5)
    assert len(errors) == 1


def test_planted_fault_breaks_the_transfer_in_the_middle() -> None:
    def fault(operation: str, ordinal: int) -> None:
        if operation == "send_chunk" and ordinal == 3:
            raise ChannelError("planted")

    channel = MemoryChannel(timeout_s=0.01, fault=fault)
    with pytest.raises(ChannelError, match="planted"):
        Outbox(channel).send(1, 4, [memoryview(b"ab"), memoryview(b"cd")])
    with pytest.raises(ChannelTimeout):
        Inbox(channel).receive(1, 4, [memoryview(bytearray(2)), memoryview(bytearray(2))])


def test_sender_may_reuse_its_buffer() -> None:
    channel = MemoryChannel()
    buffer = bytearray(b"ab")
    channel.send_chunk(memoryview(buffer))
    buffer[:] = b"xx"
    into = bytearray(2)
    channel.receive_chunk(memoryview(into))
    assert into == b"ab"


def test_chunk_of_another_size() -> None:
    channel = MemoryChannel()
    channel.send_chunk(memoryview(b"abc"))
    with pytest.raises(ChannelError):
        channel.receive_chunk(memoryview(bytearray(2)))
