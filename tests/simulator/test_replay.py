"""Against a real server that streams what a test tells it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from simulator.replay import Played, ReplayError, Target, play
from simulator.workload import Arrival
from tests.gateway.conftest import live

ARRIVALS = [Arrival(0.0, 5, 3, "high"), Arrival(0.04, 7, 2), Arrival(0.02, 1, 1, "batch")]


class Gateway:
    """Answers completions with as many tokens as are asked for, `gap_s` apart; notes what was asked, and when."""

    def __init__(self, gap_s: float = 0.005) -> None:
        self.asked: list[tuple[float, str, dict[str, Any]]] = []
        self.gap_s = gap_s
        self.refuse = 0
        self.cut = False

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.asked.append((time.perf_counter(), request.headers["priority"], body))
            if self.refuse:
                self.refuse -= 1
                return Response("no", 503)
            return StreamingResponse(self.tokens(body["max_tokens"]), media_type="text/event-stream")

        return app

    async def tokens(self, count: int) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        for number in range(count):
            await asyncio.sleep(self.gap_s)
            if self.cut:
                yield b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n'
                return
            yield b"data: " + json.dumps({"choices": [{"text": f"t{number}"}]}).encode() + b"\n\n"
        yield b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


async def played(gateway: Gateway, time_scale: float = 1.0, **target: Any) -> Played:
    async with live(gateway.app()) as url:
        return await play(Target(url, "m", **target), ARRIVALS, time_scale, 1, time.perf_counter)


async def test_everything_is_asked_and_measured() -> None:
    gateway = Gateway()
    answers = await played(gateway)
    assert not answers.failures
    assert [each.output_tokens for each in answers.measured if each] == [3, 2, 1]
    assert sorted((tier, len(body["prompt"]), body["max_tokens"]) for _, tier, body in gateway.asked) == [
        *(("batch", 1, 1), ("high", 5, 3), ("normal", 7, 2))
    ]
    assert all(body["ignore_eos"] and body["stream"] and body["min_tokens"] == body["max_tokens"] for _, _, body in gateway.asked)
    longest, _, shortest = answers.measured
    assert longest is not None
    assert longest.tpot_s is not None
    assert shortest is not None
    assert longest.ttft_s >= 0.004
    assert longest.e2e_s >= longest.ttft_s + 2 * 0.004
    assert shortest.tpot_s is None


async def test_arrivals_are_spread_by_the_time_scale() -> None:
    gateway = Gateway()
    await played(gateway, time_scale=3.0)
    first, second, third = gateway.asked
    assert [each[1] for each in gateway.asked] == ["high", "batch", "normal"]
    assert second[0] - first[0] > 0.03
    assert third[0] - first[0] > 0.09


async def test_a_failure_is_told_and_costs_only_itself() -> None:
    gateway = Gateway()
    gateway.refuse = 1
    answers = await played(gateway)
    assert answers.failures == ("status 503: no",)
    assert [each is None for each in answers.measured].count(True) == 1


async def test_errors_in_the_stream_and_silence_are_failures() -> None:
    broken, silent = Gateway(), Gateway(gap_s=30.0)
    broken.cut = True
    for gateway, timeout_s, reason in ((broken, 5.0, "gone"), (silent, 0.05, r"no whole answer within 0\.05 s")):
        async with live(gateway.app()) as url:
            with pytest.raises(ReplayError, match=reason):
                await play(Target(url, "m", timeout_s=timeout_s), ARRIVALS, 1.0, 1, time.perf_counter)


async def test_nobody_at_home_is_one_error() -> None:
    with pytest.raises(ReplayError, match="no request was answered"):
        await play(Target("http://127.0.0.1:9", "m"), ARRIVALS, 0.01, 1, time.perf_counter)
