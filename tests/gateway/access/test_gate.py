"""Keys at a real gateway: who is turned away, with what, and before what."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from backend.registry.memory import MemoryStore
from backend.registry.rates import Charge, MemoryRates, Rate
from backend.registry.store import StoreError
from gateway.access.keyfile import change_key_file
from gateway.access.keys import ApiKey, hash_of_key
from gateway.access.limiter import Limiter
from tests.gateway.conftest import BODY, Rig, make_rig, until
from tests.gateway.scripted import Exchange, shown, told, told_message

WORDS = ("a", "b", "c")


async def tells(exchange: Exchange) -> None:
    await exchange.stream(*told(WORDS))


@asynccontextmanager
async def guarded(tmp_path: Path, store: MemoryStore | None = None, **limits: Any) -> AsyncIterator[Rig]:
    """A gateway that knows one key, `secret`, and has one instance that serves m and n."""
    path = tmp_path / "keys.json"
    key = ApiKey(name="alice", sha256=hash_of_key("secret"), **limits)
    change_key_file(path, lambda table: table.with_key(key))
    async with make_rig(store, api_keys_file=path, api_keys_poll_s=0.01) as rig:
        (await rig.add("a", models=("m", "n"))).script = tells
        yield rig


async def ask(rig: Rig, key: str | None = "secret", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if "priority" in fields:
        headers["priority"] = fields.pop("priority")
    return await rig.ask(headers=headers, **fields)


def refused(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


async def test_only_holders_of_a_key_are_served(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        assert (await ask(rig)).content == shown(told(WORDS))
        for key in (None, "wrong", "se cret", "secret2"):
            assert refused(await ask(rig, key)) == (401, "invalid_api_key")
        assert refused(await rig.client.get("/v1/models")) == (401, "invalid_api_key")
        assert (await rig.client.get("/health")).status_code == 200
        assert len(rig.backends[0].seen) == 1
        assert await rig.metric('midstream_gateway_requests_total{outcome="invalid_api_key",tier="normal"} 4.0')


async def test_the_key_goes_no_further_and_without_keys_the_header_does(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        await ask(rig)
        assert "authorization" not in rig.backends[0].seen[0].headers
    async with make_rig() as rig:
        (await rig.add("a")).script = tells
        await ask(rig, "of-the-engine")
        assert rig.backends[0].seen[0].headers["authorization"] == "Bearer of-the-engine"


async def test_a_key_as_anthropics_clients_send_it(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [], "max_tokens": 1, "stream": True}
    events = told_message(WORDS)

    async def script(exchange: Exchange) -> None:
        await exchange.stream(*events)

    async with guarded(tmp_path) as rig:
        (backend := rig.backends[0]).script = script
        served = await rig.client.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
        assert served.content == shown(events)
        assert "x-api-key" not in backend.seen[0].headers
        for headers in ({"x-api-key": "wrong"}, {"x-api-key": "secret", "authorization": "Bearer wrong"}):
            wrong = await rig.client.post("/v1/messages", json=body, headers=headers)
            assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        both = await rig.client.post("/v1/messages", json=body, headers={"authorization": "Bearer secret", "x-api-key": "of-the-engine"})
        assert both.status_code == 200
        assert backend.seen[1].headers["x-api-key"] == "of-the-engine"


async def test_models_and_tiers(tmp_path: Path) -> None:
    async with guarded(tmp_path, models=["m"], highest_tier="normal") as rig:
        assert (await ask(rig)).status_code == 200
        assert (await ask(rig, priority="batch")).status_code == 200
        assert refused(await ask(rig, model="n")) == (403, "model_not_allowed")
        assert refused(await ask(rig, model=None)) == (403, "model_not_allowed")
        assert refused(await ask(rig, priority="high")) == (403, "tier_not_allowed")
        listed = await rig.client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert [card["id"] for card in listed.json()["data"]] == ["m"]
        hidden = await rig.client.get("/v1/models/n", headers={"authorization": "Bearer secret"})
        assert refused(hidden) == (404, "model_not_found")


async def test_a_request_over_the_rate_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with guarded(tmp_path, requests_per_minute=2) as rig:
        assert [(await ask(rig)).status_code for _ in range(2)] == [200, 200]
        third = await ask(rig)
        assert refused(third) == (429, "rate_limit_exceeded")
        assert third.headers["x-midstream-reason"] == "key_requests"
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert await rig.metric('midstream_gateway_requests_total{outcome="key_requests",tier="normal"} 1.0')


async def test_replicas_share_the_rates(tmp_path: Path) -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    async with guarded(tmp_path, store, requests_per_minute=2) as one, make_rig(store, api_keys_file=tmp_path / "keys.json") as other:
        answers = [await ask(rig) for rig in (one, other, one, other)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]


async def test_only_the_key_that_began_a_stream_reads_it_on(tmp_path: Path) -> None:
    store = MemoryStore(asyncio.get_running_loop().time)
    bob = ApiKey(name="bob", sha256=hash_of_key("other"))
    async with guarded(tmp_path, store) as one:
        change_key_file(tmp_path / "keys.json", lambda table: table.with_key(bob))
        async with make_rig(store, api_keys_file=tmp_path / "keys.json") as other:
            one.backends[0].others["/midstream/resume"] = tells
            headers = {"authorization": "Bearer secret", "x-midstream-resumable": "1", "x-request-id": "r1"}
            assert (await one.ask(headers=headers)).headers["x-midstream-resumable"] == "1"
            url = "/v1/streams/r1"
            assert refused(await other.client.get(url, headers={"authorization": "Bearer other"})) == (404, "stream_not_found")
            assert refused(await other.client.get(url)) == (401, "invalid_api_key")
            answer = await other.client.get(url, headers={"authorization": "Bearer secret"})
            assert (answer.status_code, answer.content.count(b"data: [DONE]")) == (200, 1)


async def test_tokens_are_charged_in_advance_and_corrected_by_what_was_relayed(tmp_path: Path) -> None:
    async with guarded(tmp_path, tokens_per_minute=1000) as rig:
        assert (await ask(rig, max_tokens=990)).status_code == 200
        await rig.quiet()
        (level,) = _levels(rig).values()
        assert level.level == pytest.approx(1000 - 2 - len(WORDS), abs=1), "two for the prompt, and those that came"
        assert (await ask(rig, max_tokens=900)).status_code == 200


async def test_over_the_token_rate(tmp_path: Path) -> None:
    async def holds(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(*told(WORDS)[:2])
        await exchange.wait_left()

    async with guarded(tmp_path, tokens_per_minute=100) as rig:
        rig.backends[0].script = holds
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=rig.url, timeout=10) as client:
            body = {**BODY, "max_tokens": 80}
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as first:
                assert first.status_code == 200
                second = await ask(rig, max_tokens=80)
                assert refused(second) == (429, "rate_limit_exceeded")
                assert second.headers["x-midstream-reason"] == "key_tokens"
        await rig.quiet()
        rig.backends[0].script = tells

        async def is_let_in() -> bool:
            return (await ask(rig, max_tokens=80)).status_code == 200

        await until(is_let_in)


async def test_what_failed_costs_no_tokens(tmp_path: Path) -> None:
    async def fails(exchange: Exchange) -> None:
        exchange.cut()

    async with guarded(tmp_path, tokens_per_minute=1000) as rig:
        rig.backends[0].script = fails
        assert (await ask(rig, max_tokens=990)).status_code == 502
        await until(lambda: not _levels(rig) or next(iter(_levels(rig).values())).level >= 999)


async def test_a_new_key_and_a_removed_one_take_effect_without_a_restart(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        path = tmp_path / "keys.json"
        change_key_file(path, lambda table: table.with_key(ApiKey(name="new", sha256=hash_of_key("new"))).without("alice"))

        async def is_in_force() -> bool:
            return (await ask(rig, "new")).status_code == 200

        await until(is_in_force)
        assert refused(await ask(rig)) == (401, "invalid_api_key")


async def test_who_has_no_key_is_told_so_before_his_body_is_read(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        parts = urlsplit(rig.url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: 60000000\r\n\r\n"
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head.encode())
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_the_admin_token_is_another_matter(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    change_key_file(path, lambda table: table.with_key(ApiKey(name="alice", sha256=hash_of_key("secret"))))
    async with make_rig(api_keys_file=path, admin_token="hush") as rig:
        assert refused(await rig.client.get("/admin/instances", headers={"authorization": "Bearer secret"})) == (401, "invalid_admin_token")
        assert (await rig.client.get("/admin/instances", headers={"authorization": "Bearer hush"})).status_code == 200
        assert refused(await ask(rig, "hush")) == (401, "invalid_api_key")


async def test_as_many_streams_as_may_be_and_then_a_503() -> None:
    async def holds(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(told()[0])
        await exchange.wait_left()

    async with make_rig(max_streams=2) as rig:
        (await rig.add("a")).script = holds
        async with rig.reading(), rig.reading():
            third = await rig.ask()
            assert refused(third) == (503, "too_many_streams")
            assert (third.headers["retry-after"], third.headers["x-midstream-reason"]) == ("1", "too_many_streams")
        await rig.quiet()
        rig.backends[0].script = tells

        async def is_let_in() -> bool:
            return (await rig.ask()).status_code == 200

        await until(is_let_in)


class Failing:
    """A RateStore that is down until told otherwise."""

    def __init__(self, behind: MemoryRates) -> None:
        self.behind = behind
        self.down = True
        self.hangs = False
        self.asked = 0

    async def take(self, charges: Sequence[Charge]) -> float:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise StoreError("down")
        return await self.behind.take(charges)

    async def correct(self, charges: Sequence[Charge]) -> None:
        await self.take(charges)


@pytest.mark.parametrize("hangs", [False, True])
async def test_without_a_store_a_gateway_holds_callers_to_their_rates_by_itself(hangs: bool) -> None:
    now_s = 0.0
    shared = Failing(MemoryRates(lambda: now_s))
    shared.hangs = hangs
    limiter = Limiter(shared, lambda: now_s, timeout_s=0.02, retry_s=5.0)
    one = [Charge("b", 1.0, Rate(0.001, 2.0))]
    assert [await limiter.take(one) > 0 for _ in range(3)] == [False, False, True]
    assert shared.asked == 1, "left alone after it failed"
    shared.down = shared.hangs = False
    now_s = 5.0
    assert await limiter.take(one) == 0, "the shared bucket is full"


def _levels(rig: Rig) -> dict[str, Any]:
    assert isinstance(rig.store, MemoryStore)
    return rig.store.rates._levels
