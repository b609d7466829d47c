"""Who may ask this backend what: the layer in front of the llumlet.

With a fleet secret, /midstream/* and requests through a flight must be signed by a member, and so must everything else unless direct use
is allowed; without one, /midstream/* and flights are for this machine's own processes. Health and metrics are open to all.
"""

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.llumlet.incoming import REQUEST_HEADER, ClientLeft, header, read_body
from backend.llumlet.reply import Reply
from backend.llumlet.routes import MESSAGE_LIMIT_BYTES, PREFIX
from backend.llumlet.settings import LlumletSettings
from backend.peers.signature import (
    PROOF_HEADER,
    REFUSAL_HEADER,
    SIGNATURE_HEADER,
    Nonces,
    Question,
    SignatureError,
    hash_of,
    prove,
    read_signature,
    verify,
)
from backend.peers.signer import wall_clock_ms

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/midstream/metrics"})
"""For GET: what probes and Prometheus read."""


class Guard:
    """Turns away who may not ask; proves, in what it lets through, that this backend is a member too."""

    def __init__(self, app: ASGIApp, settings: LlumletSettings, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._app = app
        self._secrets = settings.fleet_secrets
        self._allow_direct = settings.allow_direct
        self._authority = urlsplit(settings.advertised_url).netloc
        self._window_ms = round(settings.signature_window_s * 1000)
        self._max_body_bytes = settings.max_body_bytes
        self._clock_ms = clock_ms
        self._nonces = Nonces(self._window_ms)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._secrets and not self._allow_direct:
            await send({"type": "websocket.close", "code": 1008, "reason": "Only through the gateway."})
        elif scope["type"] != "http" or (scope["path"] in OPEN_PATHS and scope["method"] == "GET"):
            await self._app(scope, receive, send)
        else:
            await self._check(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_for_peers = scope["path"].startswith(PREFIX) or header(scope, REQUEST_HEADER) is not None
        signature = header(scope, SIGNATURE_HEADER)
        try:
            if not self._secrets:
                if is_for_peers and not _is_local(scope):
                    raise SignatureError("peers_only", "Without MIDSTREAM_FLEET_SECRET this is for processes of the same machine.")
                await self._app(scope, receive, send)
            elif signature is None and self._allow_direct and not is_for_peers:
                await self._app(scope, receive, send)
            else:
                await self._serve_peer(scope, receive, send, signature)
        except SignatureError as error:
            await _refusal(error)(scope, receive, send)
        except Reply as reply:
            await reply(scope, receive, send)
        except ClientLeft:
            return

    async def _serve_peer(self, scope: Scope, receive: Receive, send: Send, text: str | None) -> None:
        """Nothing of the body is read before the signature is believed, and nobody is served before the body is what was signed."""
        if text is None:
            raise SignatureError("unsigned", "This backend is to be used through its gateway: the request is not signed.")
        signature = read_signature(text)
        now_ms = self._clock_ms()
        secret = verify(self._secrets, self._question(scope), signature, now_ms=now_ms, window_ms=self._window_ms)
        self._nonces.note(signature.nonce, now_ms)
        body = await read_body(receive, MESSAGE_LIMIT_BYTES if scope["path"].startswith(PREFIX) else self._max_body_bytes)
        if hash_of(body) != signature.body_sha256:
            raise SignatureError("bad_signature", "The body is not the one that was signed.")

        async def send_with_proof(message: Message) -> None:
            if message["type"] == "http.response.start":
                proof = prove(secret, signature.nonce, message["status"]).encode()
                message = {**message, "headers": [*message.get("headers", ()), (PROOF_HEADER, proof)]}
            await send(message)

        await self._app(scope, _replaying(body, receive), send_with_proof)

    def _question(self, scope: Scope) -> Question:
        target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        return Question(scope["method"], self._authority, f"{target}?{query}" if query else target, tuple(scope["headers"]))


def _is_local(scope: Scope) -> bool:
    """Whether the other end of the connection is of this machine, by its loopback address."""
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refusal(error: SignatureError) -> Reply:
    status = 403 if error.code == "peers_only" else 401
    return Reply.error(status, str(error), code=error.code, headers=((REFUSAL_HEADER.decode(), error.code),))


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once, and then whatever else comes."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
