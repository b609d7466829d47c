import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backend.llumlet.link import Links
from backend.llumlet.settings import LlumletSettings
from migration.errors import LinkError, PeerGone
from migration.leg import Leg, RequestId
from migration.messages import LegState, Query, StateIs

LEG = Leg(RequestId("R"), 1)
STATE = b'{"kind":"state_is","leg":{"request":"R","epoch":1},"state":"owner"}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


@asynccontextmanager
async def peer(*answers: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives one raw answer a request; b"" closes the connection instead, None says nothing."""
    left = list(answers)
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                asked.append(await reader.readexactly(length))
                answer = left.pop(0)
                if answer is None:
                    await reader.read()
                if not answer:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    async with Links(LlumletSettings()) as links:
        yield links


async def test_a_message_gets_its_answer(links: Links) -> None:
    async with peer(OK % (len(STATE), STATE), OK % (len(STATE), STATE)) as (url, asked):
        link = links.to(url + "/")
        assert await link.ask(Query(LEG), 5.0) == StateIs(LEG, LegState.OWNER)
        assert await link.ask(Query(LEG), 5.0) == StateIs(LEG, LegState.OWNER)
    assert json.loads(asked[0]) == {"kind": "query", "leg": {"request": "R", "epoch": 1}}


async def test_nobody_listens(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(PeerGone):
        await links.to(url).ask(Query(LEG), 5.0)


async def test_a_silent_peer(links: Links) -> None:
    async with peer(None) as (url, asked):
        with pytest.raises(LinkError) as error:
            await links.to(url).ask(Query(LEG), 0.05)
    assert not isinstance(error.value, PeerGone)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", OK % (2, b"{}"), OK % (3, b"{x}"), b"what?\r\n\r\n"],
    ids=["500", "kind", "json", "http"],
)
async def test_an_answer_that_makes_no_sense(links: Links, answer: bytes) -> None:
    async with peer(answer) as (url, _):
        with pytest.raises(LinkError) as error:
            await links.to(url).ask(Query(LEG), 5.0)
    assert not isinstance(error.value, PeerGone)


async def test_a_kept_connection_that_the_peer_closed_is_not_a_failure(links: Links) -> None:
    async with peer(b"", OK % (len(STATE), STATE)) as (url, asked):
        assert await links.to(url).ask(Query(LEG), 5.0) == StateIs(LEG, LegState.OWNER)
    assert len(asked) == 2


async def test_a_peer_that_always_hangs_up(links: Links) -> None:
    async with peer(b"", b"", b"") as (url, _):
        with pytest.raises(LinkError) as error:
            await links.to(url).ask(Query(LEG), 5.0)
    assert not isinstance(error.value, PeerGone)
