"""The one HTTP client of the gateway. Its faults become UpstreamFailed here."""

import asyncio
import json
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Self

from backend.peers.signer import Signed, Signer
from gateway.deadline import within
from gateway.errors import (
    RawHeaders,
    UpstreamBroken,
    UpstreamDeclined,
    UpstreamFailed,
    UpstreamSilent,
    UpstreamUnreachable,
    UpstreamUntrusted,
)
from gateway.headers import find_header
from gateway.http_connection import Answer, Take
from gateway.http_pool import Pool, split_url
from migration.leg import Leg

log = logging.getLogger("midstream.gateway.upstream")

_NOBODY = Signer(())
"""For those who share no secret with us."""

_TARGET = re.compile(r"/[\x21-\x7e]*")


class UpstreamResponse:
    """An answer under way. A context manager: leaving it closes the connection unless the answer was read to its end."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.status = answer.status
        self.headers: RawHeaders = tuple(answer.headers)

    @property
    def is_event_stream(self) -> bool:
        kind = find_header(self.headers, b"content-type")
        return kind is not None and kind.partition(";")[0].strip().lower() == "text/event-stream"

    async def read(self, take: Take | None = None) -> bytes:
        """All bytes that are there, or the next to come; empty at a clean end. Raises UpstreamBroken.

        While nothing is there, `take` is shown what comes, as it comes; what it settles is not read. What it raises is raised here.
        """
        try:
            return await self._answer.read(take)
        except OSError as error:
            raise _broken(error) from error

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
            await within(timeout_s, self._read_out())
        except (TimeoutError, UpstreamFailed) as error:
            log.debug("an instance did not end its stream in good order: %r", error)

    async def _read_out(self) -> None:
        while await self.read():
            pass

    def close(self) -> None:
        """Idempotent. A `read` that is waiting fails at once."""
        self._answer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Upstream:
    """Opens answers at instances. Never follows redirects, keeps no cookies, limits no number of connections."""

    def __init__(self, pool: Pool, signer: Signer) -> None:
        self._pool = pool
        self._signer = signer

    @staticmethod
    @asynccontextmanager
    async def open(connect_timeout_s: float, signer: Signer | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator["Upstream"]:
        """The client, while it lasts. Answers have no deadline of the client's: whoever waits for them sets one."""
        pool = Pool(connect_timeout_s, tls)
        try:
            yield Upstream(pool, signer or Signer(()))
        finally:
            await pool.close()

    async def post(self, url: str, target: str, headers: RawHeaders, body: bytes, *, member: bool = True) -> UpstreamResponse:
        """Send a request to `url` (an instance) at `target` (path and query, as they came). Returns at the answer's head."""
        return await self._request("POST", url + target, headers, body, member=member)

    async def send(self, method: str, url: str, target: str, headers: RawHeaders, body: bytes, *, member: bool = True) -> UpstreamResponse:
        """The same with any method; without a body if there is none."""
        return await self._request(method, url + target, headers, body or None, member=member)

    async def attach(self, url: str, leg: Leg) -> UpstreamResponse:
        """Attach to the stream of a leg at that instance."""
        return await self._request("GET", f"{url}/midstream/streams/{leg.request}?epoch={leg.epoch}", (), None)

    async def request(self, method: str, url: str, headers: RawHeaders, body: bytes) -> UpstreamResponse:
        """Ask something that is no instance. Returns at the answer's head."""
        return await self._request(method, url, headers, body, member=False)

    async def fetch(self, url: str, timeout_s: float, key: str | None = None) -> tuple[int, bytes]:
        """Status and body of a plain GET. Raises UpstreamFailed, of which UpstreamSilent if it took too long."""
        headers = ((b"authorization", b"Bearer " + key.encode()),) if key else ()
        try:
            async with asyncio.timeout(timeout_s), await self._request("GET", url, headers, None, member=False) as response:
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

    async def _request(self, method: str, url: str, headers: RawHeaders, body: bytes | None, *, member: bool = True) -> UpstreamResponse:
        """A pooled connection may have been closed by the other side just now: that says nothing about the instance, so try anew.

        It may also have broken after the request had arrived: then what is sent again is refused as a double (409), and that is no answer
        to the client's request. What is asked of a `member` of the fleet is signed, and its answer must be proven.
        """
        signer = self._signer if member else _NOBODY
        base, target = _split(url)
        try:
            origin, _ = split_url(base)
        except ValueError as error:
            raise UpstreamUnreachable(f"The instance's address is none: {error}.") from error
        if not _TARGET.fullmatch(target):
            raise UpstreamBroken("The path cannot be asked for.")
        broken: OSError | None = None
        while True:
            signed = signer.sign(method, url, headers, body or b"")
            head = _head(method, target, origin.authority, (*signed.headers, *headers), body)
            try:
                connection, is_reused = await self._pool.take(origin)
            except (OSError, TimeoutError) as error:
                raise UpstreamUnreachable("The instance cannot be reached.") from error
            answer = connection.ask(head, body)
            try:
                await answer.wait_head()
                opened = _trusted(UpstreamResponse(answer), signed)
            except OSError as error:
                answer.close()
                if not is_reused:
                    raise _broken(error) from error
                broken = error
            except BaseException:  # whoever waited is cancelled: so is the request
                answer.close()
                raise
            else:
                if broken is not None and opened.status == HTTPStatus.CONFLICT:
                    opened.close()
                    raise _broken(broken) from broken
                return opened


def _trusted(opened: UpstreamResponse, signed: Signed) -> UpstreamResponse:
    """The answer, if it is from a member of the fleet. Raises UpstreamUntrusted."""
    objection = signed.objection(opened.status, opened.headers)
    if objection is not None:
        opened.close()
        raise UpstreamUntrusted(f"The instance cannot be used: {objection}")
    return opened


def _split(url: str) -> tuple[str, str]:
    """The base of a URL, of which there are few, and its path and query."""
    at = url.find("/", url.find("://") + 3)
    return (url, "/") if at < 0 else (url[:at], url[at:])


def _head(method: str, target: str, authority: bytes, headers: RawHeaders, body: bytes | None) -> bytes:
    lines = [f"{method} {target} HTTP/1.1\r\nhost: ".encode() + authority]
    lines += [name + b": " + value for name, value in headers]
    if body is not None or method not in ("GET", "HEAD", "DELETE"):
        lines.append(b"content-length: %d" % len(body or b""))
    return b"\r\n".join([*lines, b"", b""])


def _broken(error: OSError) -> UpstreamBroken:
    return UpstreamBroken(f"The connection to the instance failed: {error}.")
