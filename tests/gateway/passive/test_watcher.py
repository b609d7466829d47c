"""Passive backends, seen through a real gateway: used, lost, found again, added and removed."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from gateway.app import build_app
from gateway.settings import GatewaySettings
from tests.gateway.conftest import BODY, live, until
from tests.gateway.passive.plain import ANSWER, PlainServer, plain_server
from tests.gateway.scripted import Exchange

SETTINGS: dict[str, Any] = {"_env_file": None, "keepalive_interval_s": 0, "passive_poll_s": 0.05}


@asynccontextmanager
async def gateway(*plain: PlainServer, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that was told nothing but these addresses."""
    made = GatewaySettings(**{**SETTINGS, "backends": tuple(f"{each.url}/v1" for each in plain), **settings})
    async with live(build_app(made)) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


async def instances(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get("/admin/instances")).json()["instances"]
    return listed


async def seen(client: httpx.AsyncClient, count: int) -> None:
    async def is_seen() -> bool:
        return len(await instances(client)) == count

    await until(is_seen)


async def test_one_command_and_nothing_beside_it() -> None:
    async with plain_server() as plain, gateway(plain) as client:
        await seen(client, 1)
        (row,) = await instances(client)
        assert (row["id"], row["kind"], row["is_measured"], row["models"]) == (plain.id, "passive", True, ["m"])
        assert (row["running"], row["waiting"], row["capacity_tokens"], row["free_tokens"]) == (3, 2, 1600, 1200)
        response = await client.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.content) == (200, ANSWER)
        assert response.headers["x-midstream-instance"] == plain.id
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 2048)
        assert (await client.get("/admin/requests")).json() == {"requests": [], "silent": []}


async def test_a_server_that_shares_no_secret_is_used_beside_a_fleet_that_does() -> None:
    async with plain_server() as plain, gateway(plain, fleet_secret="a secret of sixteen bytes or more") as client:
        await seen(client, 1)
        response = await client.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.content) == (200, ANSWER)
        assert (await client.post("/tokenize", json={"model": "m", "prompt": "a"})).status_code != 502


async def test_requests_spread_over_servers_of_which_nothing_is_known() -> None:
    held = asyncio.Event()

    async def holds(exchange: Exchange) -> None:
        await held.wait()
        await exchange.stream(ANSWER)

    async with AsyncExitStack() as stack:
        plain = [await stack.enter_async_context(plain_server(metrics=None)) for _ in range(3)]
        for each in plain:
            each.backend.script = holds
        client = await stack.enter_async_context(gateway(*plain))
        await seen(client, 3)
        assert not any(row["is_measured"] for row in await instances(client))
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(client.post("/v1/chat/completions", json=BODY)) for _ in range(9)]
            await until(lambda: sum(len(each.backend.asked("/v1/chat")) for each in plain) == 9)
            held.set()
        assert [len(each.backend.asked("/v1/chat")) for each in plain] == [3, 3, 3]
        assert all(task.result().content == ANSWER for task in asked)


async def test_a_dead_server_is_left_out_and_one_that_is_back_is_used_within_two_seconds() -> None:
    async with plain_server() as plain, gateway(plain, passive_poll_s=0.5) as client:
        await seen(client, 1)
        await plain.stop()
        dead = await client.post("/v1/chat/completions", json=BODY)
        assert dead.status_code in (502, 503)
        await seen(client, 0)
        assert (await client.post("/v1/chat/completions", json=BODY)).json()["error"]["code"] == "no_instance"
        await plain.start()
        back_s = time.monotonic()

        async def is_used() -> bool:
            return (await client.post("/v1/chat/completions", json=BODY)).status_code == 200

        await until(is_used)
        assert time.monotonic() - back_s < 2.0


async def test_a_server_that_comes_back_is_not_suspected_any_more() -> None:
    async with plain_server() as first, plain_server() as second, gateway(first, second, suspect_s=60.0) as client:
        await seen(client, 2)
        await first.stop()
        for _ in range(4):
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        await seen(client, 1)
        await first.start()

        async def is_used() -> bool:
            await client.post("/v1/chat/completions", json=BODY)
            return bool(first.backend.asked("/v1/chat"))

        first.backend.seen.clear()
        await until(is_used)


async def test_unwell_servers_are_not_used() -> None:
    async with plain_server() as plain, gateway(plain) as client:
        await seen(client, 1)
        plain.health = 503
        await seen(client, 0)
        plain.health = 404  # a server that knows no /health, but lists its models
        await seen(client, 1)


async def test_backends_are_added_and_removed_by_rest() -> None:
    async with plain_server() as first, plain_server(models=("n",)) as second, gateway(first) as client:
        await seen(client, 1)
        added = await client.post("/admin/instances", json={"url": second.url})
        assert (added.status_code, added.json()) == (201, {"id": second.id, "url": second.url, "kind": "passive"})
        await seen(client, 2)
        removed = await client.delete(f"/admin/instances/{first.id}")
        assert removed.json() == {"id": first.id, "removed": True}
        await seen(client, 1)
        asked = len(first.backend.seen)
        assert (await client.post("/v1/chat/completions", json={**BODY, "model": "n"})).content == ANSWER
        assert (await client.delete(f"/admin/instances/{first.id}")).json()["error"]["code"] == "instance_not_found"
        assert len(first.backend.seen) <= asked + 1
        for body in (b"{", b"[]", b'{"url": 3}', b'{"url": "nowhere"}'):
            refused = await client.post("/admin/instances", content=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_order")


async def test_requests_never_move_to_or_from_a_passive_backend() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(b'data: {"choices":[]}\n\n')
        await exchange.wait_left()

    async with plain_server() as first, plain_server() as second, gateway(first, second) as client:
        first.backend.script = second.backend.script = stalls
        await seen(client, 2)
        async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            request = response.headers["x-request-id"]
            order = await client.post("/admin/migrations", json={"request": request})
            assert order.json()["error"]["code"] == "request_not_found"


async def test_an_answer_that_does_not_stream_may_take_longer_than_a_first_event() -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.3)
        await exchange.answer(200, b'{"choices":[]}')

    async with plain_server() as plain, gateway(plain, attempt_timeout_s=0.1, first_byte_timeout_s=0.2) as client:
        plain.backend.script = slow
        await seen(client, 1)
        response = await client.post("/v1/chat/completions", json={**BODY, "stream": False})
        assert (response.status_code, response.content) == (200, b'{"choices":[]}')
    async with plain_server() as plain, gateway(plain, answer_timeout_s=0.1) as client:
        plain.backend.script = slow
        await seen(client, 1)
        assert (await client.post("/v1/chat/completions", json={**BODY, "stream": False})).status_code in (502, 504)


async def test_two_gateways_watch_a_backend_once(redis_url: str) -> None:
    async with plain_server() as plain:
        shared = {"redis_url": redis_url, "passive_poll_s": 0.2}
        async with gateway(plain, **shared) as one, gateway(plain, **shared) as two:
            await seen(one, 1)
            await seen(two, 1)
            plain.backend.seen.clear()
            await until(lambda: len(plain.backend.asked("/health")) >= 5, within_s=10)
            asked = len(plain.backend.asked("/health"))
            begun_s = asyncio.get_running_loop().time()
            await until(lambda: len(plain.backend.asked("/health")) >= asked + 5, within_s=10)
            assert asyncio.get_running_loop().time() - begun_s > 5 * 0.2 * 0.75
            assert (await two.post("/v1/chat/completions", json=BODY)).content == ANSWER
