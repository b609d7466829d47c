"""The one HTTP client of the gateway, and the only importer of aiohttp. Its faults become UpstreamFailed here."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
from yarl import URL

from backend.peers.signer import Signer
from gateway.errors import (
    RawHeaders,
    UpstreamBroken,
    UpstreamDeclined,
    UpstreamFailed,
    UpstreamSilent,
    UpstreamUnreachable,
    UpstreamUntrusted,
)
from migration.leg import Leg

log = logging.getLogger("midstream.gateway.upstream")

IDLE_CONNECTION_S = 3.0
"""Pooled connections are dropped before the servers we talk to drop them (uvicorn: 5 s)."""

_OURS_TO_SET = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers the client library would add of its own accord."""


class UpstreamResponse:
    """An answer under way. A context manager: leaving it closes the connection unless the answer was read to its end."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: RawHeaders = tuple((name.lower(), value) for name, value in response.raw_headers)

    @property
    def is_event_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """All bytes that are there, or the next to come; empty at a clean end. Raises UpstreamBroken."""
        try:
            return await self._response.content.readany()
        except _FAULTS as error:
            raise _translated(error) from error

    async def read_all(self, limit_bytes: int) -> bytes:
        """The rest of the body. Raises UpstreamBroken, also if it is over the limit."""
        body = bytearray()
        while chunk := await self.read():
            body += chunk
            if len(body) > limit_bytes:
                raise UpstreamBroken(f"The instance's answer is over {limit_bytes} bytes.")
        return bytes(body)

    async def read_out(self, timeout_s: float) -> None:
        """Let the instance end its answer in good order, within bounds, though nobody needs the rest."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.read():
                    pass
        except (TimeoutError, UpstreamFailed) as error:
            log.debug("an instance did not end its stream in good order: %r", error)

    def close(self) -> None:
        """Idempotent. A `read` that is waiting fails at once."""
        self._response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Upstream:
    """Opens answers at instances. Never follows redirects, keeps no cookies, limits no number of connections."""

    def __init__(self, session: aiohttp.ClientSession, signer: Signer) -> None:
        self._session = session
        self._signer = signer

    @staticmethod
    @asynccontextmanager
    async def open(connect_timeout_s: float, signer: Signer | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator["Upstream"]:
        """The client, while it lasts. Answers have no deadline of the client's: whoever waits for them sets one."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls or True, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_OURS_TO_SET,
            trace_configs=[trace],
        ) as session:
            yield Upstream(session, signer or Signer(()))

    async def post(self, url: str, target: str, headers: RawHeaders, body: bytes) -> UpstreamResponse:
        """Send a request to `url` (an instance) at `target` (path and query, as they came). Returns at the answer's head."""
        return await self._request("POST", url + target, headers, body)

    async def send(self, method: str, url: str, target: str, headers: RawHeaders, body: bytes) -> UpstreamResponse:
        """The same with any method; without a body if there is none."""
        return await self._request(method, url + target, headers, body or None)

    async def attach(self, url: str, leg: Leg) -> UpstreamResponse:
        """Attach to the stream of a leg at that instance."""
        return await self._request("GET", f"{url}/midstream/streams/{leg.request}?epoch={leg.epoch}", (), None)

    async def request(self, method: str, url: str, headers: RawHeaders, body: bytes) -> UpstreamResponse:
        """Ask something that is no instance. Returns at the answer's head."""
        return await self._request(method, url, headers, body)

    async def fetch(self, url: str, timeout_s: float, key: str | None = None) -> tuple[int, bytes]:
        """Status and body of a plain GET. Raises UpstreamFailed, of which UpstreamSilent if it took too long."""
        headers = ((b"authorization", b"Bearer " + key.encode()),) if key else ()
        try:
            async with asyncio.timeout(timeout_s), await self._request("GET", url, headers, None) as response:
                return response.status, await response.read_all(limit_bytes=64 * 2**20)
        except TimeoutError:
            raise UpstreamSilent(f"The instance gave no answer within {timeout_s:g} s.") from None

    async def resume(self, url: str, order: bytes) -> UpstreamResponse:
        """Have an instance go on with a request (resuming.resume_order). Returns at the answer's head."""
        return await self._request("POST", f"{url}/midstream/resume", ((b"content-type", b"application/json"),), order)

    async def get_json(self, url: str, timeout_s: float) -> object:
        """What the instance answers, if it is a 200 in JSON within the deadline; else raises UpstreamFailed."""
        return await self._ask_json("GET", url, None, timeout_s)

    async def post_json(self, url: str, question: object, timeout_s: float) -> object:
        """The same for a POST of a JSON body."""
        return await self._ask_json("POST", url, json.dumps(question).encode(), timeout_s)

    async def _ask_json(self, method: str, url: str, body: bytes | None, timeout_s: float) -> object:
        headers = ((b"content-type", b"application/json"),) if body is not None else ()
        try:
            async with asyncio.timeout(timeout_s), await self._request(method, url, headers, body) as response:
                text = await response.read_all(limit_bytes=64 * 2**20)
        except TimeoutError:
            raise UpstreamSilent(f"The instance gave no answer within {timeout_s:g} s.") from None
        if response.status != 200:
            raise UpstreamDeclined(response.status, text[:300].decode(errors="replace"))
        try:
            return json.loads(text)
        except ValueError as error:
            raise UpstreamBroken("The instance's answer is not JSON.") from error

    async def _request(self, method: str, url: str, headers: RawHeaders, body: bytes | None) -> UpstreamResponse:
        """A pooled connection may have been closed by the other side just now: that says nothing about the instance, so try anew."""
        while True:
            signed = self._signer.sign(method, url, headers, body or b"")
            named = [(_text(name), _text(value)) for name, value in (*signed.headers, *headers)]
            trace = SimpleNamespace(reused=False)
            try:
                response = await self._session.request(
                    method, URL(url, encoded=True), headers=named, data=body, allow_redirects=False, trace_request_ctx=trace
                )
                opened = UpstreamResponse(response)
            except _FAULTS as error:
                failure = _translated(error)
                if not (trace.reused and isinstance(failure, UpstreamBroken)):
                    raise failure from error
                continue
            objection = signed.objection(opened.status, opened.headers)
            if objection is not None:
                opened.close()
                raise UpstreamUntrusted(f"The instance cannot be used: {objection}")
            return opened


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams) -> None:
    context.trace_request_ctx.reused = True


_FAULTS = (aiohttp.ClientError, OSError, ValueError)
"""What the client raises: ValueError for nonsense where HTTP should be, or for a bad URL."""


def _translated(error: Exception) -> UpstreamFailed:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamUnreachable("The instance cannot be reached.")
    return UpstreamBroken(f"The connection to the instance failed: {type(error).__name__}.")


def _text(raw: bytes) -> str:
    """The client library encodes as UTF-8; other bytes can only be kept as Latin-1 text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
