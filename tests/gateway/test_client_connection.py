"""Writing past the server: only chunks of an answer under way, and only while the client reads."""

from typing import Any, cast

import pytest

from gateway.client_connection import ROOM_BYTES, ClientConnection, GatheringTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.waiting, self.closing = 0, False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing


def begun(wire: Wire, head: bytes) -> GatheringTransport:
    connection = GatheringTransport(cast("Any", wire), lambda: None)
    connection.gather()
    connection.write(head)
    connection.write(b"5\r\nfirst\r\n")
    connection.flush()
    return connection


def test_a_chunk_is_framed() -> None:
    wire = Wire()
    connection = begun(wire, CHUNKED)
    assert connection.has_room
    connection.write_chunk(b"x" * 17)
    assert wire.sent[1:] == [b"11\r\n" + b"x" * 17 + b"\r\n"]


@pytest.mark.parametrize(
    "head",
    [HEAD + b"\r\n", HEAD + b"content-length: 5\r\n\r\n", HEAD + b"\r\ntransfer-encoding: chunked\r\n\r\n"],
    ids=["to the end", "length", "body"],
)
def test_an_answer_without_chunks_has_no_room(head: bytes) -> None:
    assert not begun(Wire(), head).has_room


def test_there_is_no_room_where_the_client_does_not_read_or_has_left() -> None:
    wire = Wire()
    connection = begun(wire, CHUNKED)
    wire.waiting = ROOM_BYTES
    assert not connection.has_room
    wire.waiting, wire.closing = 0, True
    assert not connection.has_room
    wire.closing = False
    assert connection.has_room
    connection.lost()
    assert not connection.has_room


def test_the_next_answer_on_the_connection_is_another() -> None:
    connection = begun(Wire(), CHUNKED)
    connection.gather()
    assert not connection.has_room


def test_a_server_that_is_not_ours_offers_nothing() -> None:
    assert not ClientConnection().has_room
