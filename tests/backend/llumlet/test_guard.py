"""Who may ask a backend what, over real connections; and that gateways and llumlets with one secret get on."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from backend.llumlet.guard import Guard
from backend.llumlet.link import Links
from backend.llumlet.settings import LlumletSettings
from backend.peers.signer import Signer, wall_clock_ms
from gateway.errors import UpstreamUntrusted
from gateway.upstream import Upstream
from migration.errors import LinkError
from migration.leg import Leg, RequestId
from migration.messages import LegState, Query, StateIs
from tests.backend.llumlet.live import CHAT_STREAM, Backend, running_backend
from tests.backend.llumlet.scripted_engine import CHAT, event

SECRET = "s" * 32
OTHER = "o" * 32
LEG = Leg(RequestId("R"), 1)


def signer(secret: str = SECRET, skew_ms: int = 0) -> Signer:
    return Signer((secret.encode(),), lambda: wall_clock_ms() + skew_ms)


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with running_backend(fleet_secret=SECRET) as backend:
        yield backend


@asynccontextmanager
async def upstream_of(signs: Signer) -> AsyncIterator[Upstream]:
    async with Upstream.open(1.0, signs) as upstream:
        yield upstream


async def ask(backend: Backend, method: str, path: str, body: bytes = b"", *, signs: Signer, sent: bytes | None = None) -> httpx.Response:
    signed = signs.sign(method, backend.url + path, (), body)
    headers = {name.decode(): value.decode() for name, value in signed.headers}
    return await backend.client.request(method, backend.url + path, content=body if sent is None else sent, headers=headers)


def refused(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["x-midstream-refusal"] == response.json()["error"]["code"]
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("path", ["/midstream/requests", "/midstream/load", "/midstream/streams/R?epoch=0", "/v1/models", "/tokenize"])
async def test_nothing_is_answered_unsigned(backend: Backend, path: str) -> None:
    assert refused(await backend.client.get(backend.url + path)) == (401, "unsigned")
    assert refused(await backend.client.post(backend.url + path, json={})) == (401, "unsigned")


async def test_requests_through_a_flight_are_refused_unsigned_and_reach_no_handler(backend: Backend) -> None:
    async with backend.chat() as answer:
        assert answer.status == 401
    assert backend.engine.seen == []


@pytest.mark.parametrize("path", ["/health", "/metrics", "/midstream/metrics"])
async def test_probes_and_metrics_stay_open(backend: Backend, path: str) -> None:
    assert (await backend.client.get(backend.url + path)).status_code == 200


async def test_a_member_is_served_once(backend: Backend) -> None:
    signed = signer().sign("GET", f"{backend.url}/midstream/requests", (), b"")
    headers = {name.decode(): value.decode() for name, value in signed.headers}
    first = await backend.client.get(f"{backend.url}/midstream/requests", headers=headers)
    assert first.json() == {"requests": []}
    assert signed.objection(first.status_code, first.headers.raw) is None
    again = await backend.client.get(f"{backend.url}/midstream/requests", headers=headers)
    assert refused(again) == (401, "replayed")


async def test_wrong_secrets_wrong_bodies_and_wrong_clocks(backend: Backend) -> None:
    assert refused(await ask(backend, "GET", "/midstream/load", signs=signer(OTHER))) == (401, "bad_signature")
    wrong_body = await ask(backend, "POST", "/midstream/messages", b"{}", signs=signer(), sent=b"[]")
    assert refused(wrong_body) == (401, "bad_signature")
    for skew_ms in (-59_000, 59_000):
        assert (await ask(backend, "GET", "/midstream/load", signs=signer(skew_ms=skew_ms))).status_code == 200
    for skew_ms in (-61_000, 61_000):
        assert refused(await ask(backend, "GET", "/midstream/load", signs=signer(skew_ms=skew_ms))) == (401, "stale_signature")


async def test_a_request_meant_for_one_backend_is_not_good_for_another(backend: Backend) -> None:
    async with running_backend(fleet_secret=SECRET, instance_id="i2") as other:
        signed = signer().sign("GET", f"{other.url}/midstream/load", (), b"")
        headers = {name.decode(): value.decode() for name, value in signed.headers}
        assert refused(await backend.client.get(f"{backend.url}/midstream/load", headers=headers)) == (401, "bad_signature")


async def test_direct_use_can_be_allowed_but_not_of_what_is_for_peers() -> None:
    async with running_backend(fleet_secret=SECRET, allow_direct=True) as backend:
        assert (await backend.client.get(f"{backend.url}/v1/models")).status_code == 200
        assert refused(await backend.client.get(f"{backend.url}/midstream/load")) == (401, "unsigned")
        async with backend.chat() as answer:
            assert answer.status == 401


async def test_a_gateway_with_the_secret_reads_a_stream(backend: Backend) -> None:
    headers = ((b"x-midstream-request", b"R"), (b"x-midstream-epoch", b"0"), (b"content-type", b"application/json"))
    async with upstream_of(signer()) as upstream:
        backend.engine.feed(7, event("a"), None)
        async with await upstream.post(backend.url, CHAT, headers, CHAT_STREAM) as response:
            assert response.status == 200
            assert event("a") in await response.read_all(10_000)
        assert await upstream.get_json(f"{backend.url}/midstream/requests", 5) == {"requests": []}


async def test_a_gateway_with_another_secret_or_none_fails_as_an_instance_does(backend: Backend) -> None:
    for signs in (signer(OTHER), Signer(())):
        async with upstream_of(signs) as upstream:
            with pytest.raises(UpstreamUntrusted):
                await upstream.post(backend.url, CHAT, ((b"x-midstream-request", b"R"),), CHAT_STREAM)


async def test_a_gateway_with_a_secret_does_not_believe_a_backend_without() -> None:
    async with running_backend() as backend, upstream_of(signer()) as upstream:
        with pytest.raises(UpstreamUntrusted):
            await upstream.get_json(f"{backend.url}/midstream/requests", 5)


async def test_llumlets_ask_each_other_signed(backend: Backend) -> None:
    async with Links(LlumletSettings.model_validate({"fleet_secret": f"{SECRET},{OTHER}"})) as links:
        assert await links.to(backend.url).ask(Query(LEG), 5.0) == StateIs(LEG, LegState.UNKNOWN)
    for secret in (OTHER, None):
        async with Links(LlumletSettings.model_validate({"fleet_secret": secret})) as links:
            with pytest.raises(LinkError, match="turned the request away"):
                await links.to(backend.url).ask(Query(LEG), 5.0)


@pytest.mark.parametrize(
    ("client", "is_let_through"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False), ("::ffff:10.0.0.7", False)],
)
@pytest.mark.parametrize(("path", "headers"), [("/midstream/requests", []), (CHAT, [(b"x-midstream-request", b"R")])])
async def test_without_a_secret_what_is_for_peers_is_for_this_machine(
    client: str, is_let_through: bool, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    status, body = await _call({"client": (client, 5), "path": path, "headers": headers})
    assert (status == 200) is is_let_through
    if not is_let_through:
        assert (status, json.loads(body)["error"]["code"]) == (403, "peers_only")


async def test_without_a_secret_plain_requests_are_for_everybody() -> None:
    assert (await _call({"client": ("10.0.0.7", 5), "path": CHAT, "headers": []}))[0] == 200
    assert (await _call({"client": None, "path": "/midstream/load", "headers": []}))[0] == 403


async def _call(parts: dict[str, object]) -> tuple[int, bytes]:
    """Through a guard without a secret, from any address: those of other machines cannot be had on this one."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    guard = Guard(app, LlumletSettings(advertised_url="http://127.0.0.1:1"))
    await guard({"type": "http", "method": "POST", "query_string": b"", **parts}, receive, send)
    return sent[0]["status"], sent[1]["body"]
