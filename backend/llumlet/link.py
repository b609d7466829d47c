"""Carries migration messages to other llumlets: POST /midstream/messages. The one importer of an HTTP client in the backend."""

import asyncio
import json
from types import TracebackType
from typing import Self

import aiohttp

from backend.llumlet.settings import LlumletSettings
from backend.peers.signer import Signer
from migration.codec import answer_from_json, to_json
from migration.errors import LinkError, PeerGone, ProtocolError
from migration.messages import Answer, Message

_TRIES = 2
_KEEPALIVE_S = 4.0  # below the servers' own, so that a kept connection is seldom found closed


class HttpLink:
    """To one peer. Implements migration.ports.Link."""

    def __init__(self, client: aiohttp.ClientSession, url: str, signer: Signer) -> None:
        self._client = client
        self._signer = signer
        self._url = f"{url}/midstream/messages"

    async def ask(self, message: Message, timeout_s: float) -> Answer:
        """Send and return the answer. Raises LinkError (unknown whether it arrived) or PeerGone (nobody listens there)."""
        body = json.dumps(to_json(message), separators=(",", ":")).encode()
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(1, _TRIES + 1):
                    try:
                        return answer_from_json(json.loads(await self._post(body)))
                    except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                        # A kept connection that the peer had closed, most likely; every message may be repeated.
                        if attempt == _TRIES:
                            raise
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise PeerGone(f"{self._url}: {error}") from error
            raise LinkError(f"{self._url}: {error}") from error
        except (TimeoutError, OSError, aiohttp.ClientError, ProtocolError, ValueError) as error:
            raise LinkError(f"{self._url}: {error!r}") from error
        raise LinkError(f"{self._url}: no answer")

    async def _post(self, body: bytes) -> bytes:
        signed = self._signer.sign("POST", self._url, (), body)
        headers = {"content-type": "application/json", **{name.decode(): value.decode() for name, value in signed.headers}}
        async with self._client.post(self._url, data=body, headers=headers) as response:
            objection = signed.objection(response.status, response.raw_headers)
            if objection is not None:
                raise LinkError(f"{self._url}: {objection}")
            answer = await response.read()
            if response.status != 200:
                raise LinkError(f"{self._url}: status {response.status}: {answer[:200]!r}")
            return answer


class Links:
    """All links of this instance, over one pool of connections; an async context manager."""

    def __init__(self, settings: LlumletSettings) -> None:
        self._settings = settings
        self._client: aiohttp.ClientSession | None = None
        self._signer = Signer(settings.fleet_secrets)

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self._settings.tls.for_client(), limit_per_host=self._settings.link_connections, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.link_connect_timeout_s),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._client is not None
        await self._client.close()

    def to(self, url: str) -> HttpLink:
        """The link to the llumlet at that base URL."""
        assert self._client is not None, "used outside its context"
        return HttpLink(self._client, url.rstrip("/"), self._signer)
