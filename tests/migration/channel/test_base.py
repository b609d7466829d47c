"""Frames, and what a receiver makes of leftovers."""

import pytest

from migration.channel.base import HEADER_BYTES, Header, Inbox, Outbox
from migration.channel.memory import MemoryChannel
from migration.errors import ChannelError


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel(timeout_s=0.05)


def receive(inbox: Inbox[memoryview], transfer: int, size: int) -> bytes:
    into = bytearray(size)
    half = size // 2
    inbox.receive(transfer, size, [memoryview(into)[:half], memoryview(into)[half:]])
    return bytes(into)


def send(channel: MemoryChannel, transfer: int, data: bytes) -> None:
    half = len(data) // 2
    Outbox(channel).send(transfer, len(data), [memoryview(data[:half]), memoryview(data[half:])])


@pytest.mark.parametrize("header", [Header(0, 0), Header(2**63, 2**40), Header(7, 0, aborted=True)])
def test_header_round_trip(header: Header) -> None:
    assert len(header.to_bytes()) == HEADER_BYTES
    assert Header.from_bytes(header.to_bytes()) == header


@pytest.mark.parametrize("raw", [b"", b"x" * HEADER_BYTES, Header(1, 1).to_bytes()[:-1], b"MSKV\2" + bytes(HEADER_BYTES - 5)])
def test_no_header(raw: bytes) -> None:
    with pytest.raises(ChannelError):
        Header.from_bytes(raw)


def test_transfers_in_order(channel: MemoryChannel) -> None:
    inbox = Inbox(channel)
    for transfer, data in [(1, b"abcdef"), (5, b"gh")]:
        send(channel, transfer, data)
        assert receive(inbox, transfer, len(data)) == data


def test_aborted_transfer_leaves_the_channel_usable(channel: MemoryChannel) -> None:
    inbox = Inbox(channel)
    Outbox(channel).abort(1)
    send(channel, 2, b"abcd")
    with pytest.raises(ChannelError, match="given transfer 1 up") as caught:
        receive(inbox, 1, 4)
    assert caught.value.reason == "aborted"
    assert receive(inbox, 2, 4) == b"abcd"


def test_transfer_that_never_came_is_told_by_the_next(channel: MemoryChannel) -> None:
    inbox = Inbox(channel)
    send(channel, 3, b"abcd")
    with pytest.raises(ChannelError, match="transfer 2 will not come"):
        receive(inbox, 2, 4)
    assert receive(inbox, 3, 4) == b"abcd"


def test_abort_that_nobody_waited_for_is_skipped(channel: MemoryChannel) -> None:
    Outbox(channel).abort(1)
    Outbox(channel).abort(2)
    send(channel, 3, b"abcd")
    assert receive(Inbox(channel), 3, 4) == b"abcd"


def test_leftover_blocks_close_the_channel(channel: MemoryChannel) -> None:
    """Never into the wrong request's memory."""
    inbox = Inbox(channel)
    send(channel, 1, b"abcd")
    with pytest.raises(ChannelError, match="expected transfer 2"):
        receive(inbox, 2, 4)
    with pytest.raises(ChannelError, match="closed"):
        receive(inbox, 3, 4)


def test_other_size_closes_the_channel(channel: MemoryChannel) -> None:
    send(channel, 1, b"abcdef")
    with pytest.raises(ChannelError):
        receive(Inbox(channel), 1, 4)
    with pytest.raises(ChannelError):
        send(channel, 2, b"abcd")
