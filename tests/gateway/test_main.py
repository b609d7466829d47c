"""The process: its flags, its settings, and how it stops."""

import asyncio
import json

import httpx
import pytest
from pydantic import ValidationError

from gateway.__main__ import main
from gateway.settings import GatewaySettings
from tests.gateway.conftest import BODY, make_rig
from tests.gateway.scripted import Exchange, chunk, told


def test_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "--redis" in capsys.readouterr().out


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_PORT", "1234")
    monkeypatch.setenv("MIDSTREAM_ADMIN_TOKEN", "hush")
    settings = GatewaySettings(_env_file=None, host="::1")
    assert (settings.port, settings.admin_secret, settings.listens_on_loopback) == (1234, "hush", True)
    assert "hush" not in repr(settings)
    monkeypatch.setenv("MIDSTREAM_PORT", "many")
    with pytest.raises(ValidationError):
        GatewaySettings()


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False), ("", False), ("10.1.2.3", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert GatewaySettings(host=host).listens_on_loopback is loopback


async def test_two_gateways_draw_different_names() -> None:
    assert GatewaySettings().gateway_id != GatewaySettings().gateway_id


async def test_stopping_ends_a_stream_that_outlives_its_grace_with_an_error_not_a_cut() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(told()[0])
        await exchange.wait_left()

    begun = asyncio.Event()

    async def read(url: str) -> bytes:
        content = b""
        async with httpx.AsyncClient(timeout=10) as client, client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as response:
            async for part in response.aiter_raw():
                content += part
                begun.set()
        return content

    async with asyncio.TaskGroup() as tasks, make_rig() as rig:
        (await rig.add("a")).script = stalls
        reading = tasks.create_task(read(rig.url))
        await begun.wait()
    content = reading.result()
    assert content.startswith(chunk(""))
    error, done, nothing = content.removeprefix(chunk("")).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert (done, nothing) == (b"data: [DONE]", b"")
