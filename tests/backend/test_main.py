"""`python -m backend`, as a process of its own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from backend.__main__ import main

DEADLINE_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def backend(port: int, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backend", "--engine", "fake", "--port", str(port), "--instance-id", "i7"),
        env={**os.environ, **environment},
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
            while True:
                assert process.returncode is None
                try:
                    await client.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_lets_a_running_request_end_and_refuses_others() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"model": "fake", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with backend(port) as process, httpx.AsyncClient(timeout=DEADLINE_S) as client:
        report = (await client.get(f"{url}/midstream/load")).json()
        assert (report["instance"], report["url"], report["state"], report["engine"]) == ("i7", url, "ready", "fake")
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers={"x-midstream-request": "R"}) as response:
            chunks = response.aiter_raw()
            text = await anext(chunks)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                while (await client.get(f"{url}/midstream/load")).json()["state"] != "draining":
                    await asyncio.sleep(0.01)
            refused = await client.post(f"{url}/v1/completions", json=body, headers={"x-midstream-request": "S"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            async for chunk in chunks:
                text += chunk
        assert text.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


async def test_a_second_signal_stops_at_once() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with (
        backend(port, MIDSTREAM_SHUTDOWN_TIMEOUT_S="1") as process,
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=body, headers={"x-midstream-request": "R"}) as response,
    ):
        await anext(response.aiter_raw())
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while (await client.get(f"{url}/midstream/load")).json()["state"] != "draining":
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("arguments", [["--engine", "fake", "--", "--flag"], ["--engine", "fake", "--host", "0.0.0.0"], ["--engine", "x"]])
def test_what_makes_no_sense_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err
