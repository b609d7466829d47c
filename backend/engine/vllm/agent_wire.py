"""PURE. What the API process and a worker's KV agent say to each other: a length (4 bytes, big-endian), then msgpack."""

from io import BufferedIOBase

import msgspec


class AgentSettings(msgspec.Struct, frozen=True):
    """`host` is where peers reach this worker; `bytes_per_s` 0 means no cap."""

    directory: str
    host: str
    timeout_s: float
    chunk_bytes: int
    bytes_per_s: float


class Started(msgspec.Struct, frozen=True):
    """What an agent says of itself once: its Unix socket and its part of the KV layout."""

    rank: int
    path: str
    backend: str
    block_bytes: int
    parts: int
    shape: str
    dtype: str
    unmovable: str = ""
    """Why this worker's KV cache cannot be carried block by block; '' if it can."""


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Open the source's end of a channel; answered Offered with the rendezvous address."""

    incarnation: str


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Join a channel (or find it joined already)."""

    incarnation: str
    address: str


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Send these blocks, in order; an empty list tells the receiver that nothing comes."""

    incarnation: str
    transfer: int
    blocks: list[int]


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    incarnation: str
    transfer: int
    blocks: list[int]


class Close(msgspec.Struct, frozen=True, tag="close"):
    incarnation: str


class ExportSampler(msgspec.Struct, frozen=True, tag="export"):
    """The random state of a frozen request."""

    request: str


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Know this request as if it had run here. `sampling_params` is msgpack of vLLM's own struct.

    `sampler` is its random state; where nobody knows it any more, it is that of its seed after `draws` draws.
    """

    request: str
    prompt: list[int]
    output: list[int]
    computed_tokens: int
    sampling_params: bytes
    sampler: bytes
    draws: int = 0


class Ok(msgspec.Struct, frozen=True, tag="ok"):
    pass


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    address: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    bytes: int


class Sampler(msgspec.Struct, frozen=True, tag="sampler"):
    state: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    detail: str


Order = Offer | Accept | Send | Receive | Close | ExportSampler | Adopt
Reply = Ok | Offered | Moved | Sampler | Refused

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Order | Reply) -> bytes:
    """The frame's payload."""
    return msgspec.msgpack.encode(message)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def decode_order(payload: bytes) -> Order:
    return _orders.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    return _replies.decode(payload)


def read_blocking(stream: BufferedIOBase) -> bytes:
    """One frame's payload. Raises EOFError at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    payload = stream.read(int.from_bytes(head, "big"))
    return payload


def write_blocking(stream: BufferedIOBase, payload: bytes) -> None:
    stream.write(frame(payload))
    stream.flush()
