"""Processes with certificates: a gateway and a backend over TLS, and whom they turn away."""

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from backend.llumlet.link import Links
from backend.llumlet.settings import LlumletSettings
from backend.peers.tls import TlsFiles
from backend.registry.redis import RedisStore
from deploy.health import free_ports
from gateway.errors import UpstreamUnreachable
from gateway.upstream import Upstream
from migration.errors import LinkError
from migration.leg import Leg, RequestId
from migration.messages import LegState, Query, StateIs
from tests.backend.peers.certificates import Authority
from tests.backend.registry.conftest import redis_url  # noqa: F401  # a fixture

HOST = "127.0.0.1"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5}
LEG = Leg(RequestId("R"), 1)


@dataclass(frozen=True, slots=True)
class Scene:
    """A CA that the fleet trusts, one that it does not, and a certificate of each."""

    ours: Authority
    others: Authority
    fleet: TlsFiles
    stranger: TlsFiles


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    fleet = TlsFiles(*ours.issue("member"), client_ca=ours.file, ca=ours.file)
    return Scene(ours, others, fleet, TlsFiles(*others.issue("stranger"), ca=ours.file))


def environment(tls: TlsFiles, *, asks_clients: bool = True) -> dict[str, str]:
    names = {"TLS_CERTIFICATE": tls.certificate, "TLS_KEY": tls.key, "TLS_CA": tls.ca}
    if asks_clients:
        names["TLS_CLIENT_CA"] = tls.client_ca
    return {f"MIDSTREAM_{name}": str(path) for name, path in names.items() if path is not None}


@asynccontextmanager
async def running(*command: str, port: int, more: Mapping[str, str]) -> AsyncIterator[str]:
    """A process that listens on that port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, "--host", HOST, "--port", str(port)),
        env={**os.environ, **more},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(50):
            while True:
                assert process.returncode is None
                try:
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        yield f"https://{HOST}:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.timeout(150)
async def test_a_fleet_over_tls(scene: Scene, redis_url: str) -> None:  # noqa: F811
    """Client to gateway with a server certificate; gateway to backend and backend to backend with certificates on both sides."""
    backend_port, gateway_port = free_ports(HOST, 2)
    secret = {"MIDSTREAM_FLEET_SECRET": "s" * 32}
    backend = running("backend", "--engine", "fake", "--redis", redis_url, port=backend_port, more={**environment(scene.fleet), **secret})
    front = {**environment(scene.fleet, asks_clients=False), **secret}
    async with backend as url, running("gateway", "--redis", redis_url, port=gateway_port, more=front) as gateway:
        trusting = ssl.create_default_context(cafile=str(scene.ours.file))
        async with httpx.AsyncClient(verify=trusting, timeout=20) as client:
            async with asyncio.timeout(30):
                while (await client.get(f"{gateway}/health")).json()["instances"] != 1:
                    await asyncio.sleep(0.05)
            answer = await client.post(f"{gateway}/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)
            store = RedisStore(redis_url)
            (sighting,) = await store.sightings()
            await store.close()
            assert sighting.report.url == url, "it advertises https by itself"
            with pytest.raises(httpx.TransportError):  # no certificate to show
                await client.get(f"{url}/health")
        await _assert_strangers_are_turned_away(scene, url)


async def _assert_strangers_are_turned_away(scene: Scene, url: str) -> None:
    async with Upstream.open(5.0, tls=scene.fleet.for_client()) as member:
        with pytest.raises(Exception, match="MIDSTREAM_FLEET_SECRET"):
            await member.get_json(f"{url}/midstream/load", 5.0)
    for tls in (scene.stranger, TlsFiles(ca=scene.others.file), TlsFiles()):
        async with Upstream.open(5.0, tls=tls.for_client()) as stranger:
            with pytest.raises(Exception, match=r"cannot be reached|failed"):
                await stranger.get_json(f"{url}/midstream/load", 5.0)
    settings = {"tls_certificate": scene.fleet.certificate, "tls_key": scene.fleet.key, "tls_ca": scene.fleet.ca, "fleet_secret": "s" * 32}
    async with Links(LlumletSettings.model_validate(settings)) as links:
        assert await links.to(url).ask(Query(LEG), 5.0) == StateIs(LEG, LegState.UNKNOWN)
    async with Links(LlumletSettings.model_validate({"fleet_secret": "s" * 32, "tls_ca": scene.others.file})) as links:
        with pytest.raises(LinkError):
            await links.to(url).ask(Query(LEG), 5.0)


async def test_an_unknown_server_is_unreachable(scene: Scene) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert scene.stranger.certificate is not None
    context.load_cert_chain(scene.stranger.certificate, scene.stranger.key)
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0, ssl=context)
    async with server, Upstream.open(5.0, tls=scene.fleet.for_client()) as upstream:
        with pytest.raises(UpstreamUnreachable):
            await upstream.get_json(f"https://{HOST}:{server.sockets[0].getsockname()[1]}/", 5.0)


def test_nothing_named_is_no_tls() -> None:
    assert (TlsFiles().scheme, TlsFiles().for_server()) == ("http", {})
    assert TlsFiles().for_client().verify_mode is ssl.CERT_REQUIRED
