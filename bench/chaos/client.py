"""Clients as they should be: they read on, and where nothing was shown to them yet they try again, as the answer or the break suggests."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.chaos.fleet import ChaosFleet, GatewayPart
from bench.chaos.verdict import Got

RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
_CURSOR = re.compile(rb"^id: ?([^\n]*)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Request:
    """One of the requests of the load, and where it goes."""

    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def requests_of(model: str, output_tokens: Sequence[int]) -> Sequence[Request]:
    """Of every API that is relayed, streaming and not, greedy and seeded, short and long; what each is answered is a function of it."""
    made = []
    for number, tokens in enumerate(output_tokens):
        seeded = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        common = {"model": model, "max_tokens": tokens, "ignore_eos": True, **seeded}
        text = f"Story {number}: they crossed the river on a borrowed horse. " * (1 + 3 * number)
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        made.append(Request("/v1/chat/completions", {**common, **streaming, "messages": [{"role": "user", "content": text}]}))
        made.append(Request("/v1/completions", {**common, "stream": True, "prompt": text}))
        made.append(Request("/v1/completions", {**common, "prompt": text}))
        asked = [{"role": "user", "content": text}]
        greedy = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
        made.append(Request("/v1/messages", {**greedy, "max_tokens": tokens, "messages": asked}))
        made.append(Request("/v1/responses", {**greedy, "max_output_tokens": tokens, "input": asked, "store": False, **seeded}))
    return made


class Client:
    """Reads answers from a fleet; counts new tries, goings-on elsewhere, and the longest silence within an answer."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._asked = 0
        self.retried = 0
        self.reconnected = 0
        self.running = 0
        self.longest_silence_s = 0.0

    def new(self, request: Request) -> Got:
        """An answer to come. Ids are never used twice, and all of one length."""
        return Got(self._next_id(), request.streams)

    async def read(self, request: Request, gateway: int, got: Got) -> None:
        """Read the answer to its end, or to where it broke."""
        self.running += 1
        try:
            async with asyncio.timeout(self._fleet.pace.patience_s):
                while not await self._try(request, self._fleet.gateways[gateway % len(self._fleet.gateways)], got):
                    self.retried += 1
                    gateway += 1
                    got.request = self._next_id()
        except TimeoutError:
            got.gave_up = True
            got.reader_failed = f"no end within {self._fleet.pace.patience_s:g} s"
        finally:
            self.running -= 1

    def _next_id(self) -> str:
        self._asked += 1
        return f"chaos-{self._asked:07d}"

    async def _try(self, request: Request, gateway: GatewayPart, got: Got) -> bool:
        """False if it is to be tried once more, elsewhere."""
        headers = {"x-request-id": got.request, "x-midstream-resumable": "1"}
        troubles = gateway.process.troubles
        got.status, got.body = 0, b""
        try:
            async with self._fleet.client.post(gateway.url + request.path, json=request.body, headers=headers) as response:
                if response.status in (429, 503):
                    await asyncio.sleep(min(LONGEST_RETRY_S, float(response.headers.get("retry-after", RETRY_S))))
                    return False
                await self._take(response, got)
            return True
        except (OSError, aiohttp.ClientError) as error:
            got.reader_failed = repr(error)
            got.gateway_gone = gateway.process.troubles > troubles or gateway.process.hung or not gateway.process.alive
        if not got.body:
            await asyncio.sleep(RETRY_S)
            return False
        await self._go_on(gateway, got)
        return True

    async def _take(self, response: aiohttp.ClientResponse, got: Got) -> None:
        got.status = response.status
        heard_s = time.perf_counter()
        async for chunk in response.content.iter_any():
            now_s = time.perf_counter()
            if got.stream and got.body:
                self.longest_silence_s = max(self.longest_silence_s, now_s - heard_s)
            heard_s = now_s
            got.body += chunk
        got.ended = True

    async def _go_on(self, broken: GatewayPart, got: Got) -> None:
        """A stream whose gateway is gone is read on at the others, from its last whole event; what nobody knows stays as it is."""
        gateways = self._fleet.gateways
        at = gateways.index(broken)
        while got.stream and not got.ended:
            at += 1
            got.body = whole_events(got.body)
            seen = _CURSOR.findall(got.body)
            headers = {"last-event-id": seen[-1].decode()} if seen else {}
            url = f"{gateways[at % len(gateways)].url}/v1/streams/{got.request}"
            try:
                async with self._fleet.client.get(url, headers=headers) as response:
                    if response.status == 200:
                        self.reconnected += 1
                        await self._take(response, got)
                        return
                    got.reader_failed = f"{response.status} {await response.text()}"
                    if response.status not in (409, 429, 503):
                        return
            except (OSError, aiohttp.ClientError) as error:
                got.reader_failed = repr(error)
            await asyncio.sleep(RETRY_S)


def whole_events(body: bytes) -> bytes:
    """Without what came of an event that did not come to its end."""
    return body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
