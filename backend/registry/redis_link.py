"""The connection to Redis (6.2 and later, one primary), and the only importer of its client. Every operation is one script, hence atomic
and one round trip; time is Redis's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from backend.registry.store import StoreError

CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function ms(number) return string.format('%.0f', number) end
"""
"""Begins every script that needs the time: `now`, in milliseconds; `ms(n)` writes such a number in full."""

HEARTBEAT_S = 5.0
"""A subscription that hears nothing for so long asks whether its connection still stands."""


class RedisScript:
    """One Lua script that takes arguments and no keys."""

    def __init__(self, link: "RedisLink", script: AsyncScript) -> None:
        self._link = link
        self._script = script

    async def __call__(self, *args: str | int) -> object:
        """Its answer. Raises StoreError."""
        async with self._link.answering():
            answer: object = await self._script(args=list(args))
            return answer

    async def as_list(self, *args: str | int) -> list[Any]:
        """Its answer, a list. Raises StoreError."""
        answer = await self(*args)
        if not isinstance(answer, list):
            raise StoreError(f"expected a list from redis, got {type(answer).__name__}")
        return answer


class RedisSubscription:
    """One channel's messages; what they say does not matter here."""

    def __init__(self, pubsub: PubSub) -> None:
        self._pubsub = pubsub

    async def wait(self) -> None:
        """Return when a message has come since the last call returned. Raises StoreError when the connection is gone."""
        now_s = asyncio.get_running_loop().time
        asked = False
        try:
            while True:
                began_s = now_s()
                if await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=HEARTBEAT_S):
                    return
                if now_s() - began_s < HEARTBEAT_S / 2:  # an answer, which is no message
                    asked = False
                elif asked:
                    raise StoreError("redis: a subscription is not answered any more")
                else:
                    await self._pubsub.ping()
                    asked = True
        except (RedisError, OSError, ValueError) as error:
            raise StoreError(f"redis: {type(error).__name__}: {error}") from error


class RedisLink:
    """Every call ends within about twice `timeout_s`, with StoreError if need be.

    A call cut off by a broken connection is repeated once at once: each script may safely run twice.
    """

    def __init__(self, url: str, *, timeout_s: float = 1.0, max_connections: int = 16) -> None:
        self._timeout_s = timeout_s
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._redis = Redis.from_pool(pool)

    def script(self, body: str) -> RedisScript:
        """Known to the server by its hash from the first call on."""
        return RedisScript(self, self._redis.register_script(body))

    async def put(self, key: str, value: str, ttl_s: float) -> None:
        async with self.answering():
            await self._redis.set(key, value, px=whole_ms(ttl_s))

    async def get(self, key: str) -> str | None:
        async with self.answering():
            value = await self._redis.get(key)
            return None if value is None else str(value)

    @asynccontextmanager
    async def subscription(self, channel: str) -> AsyncIterator[RedisSubscription]:
        """A connection of its own that hears the channel. Raises StoreError."""
        async with self._redis.pubsub() as pubsub:
            async with self.answering():
                await pubsub.subscribe(channel)
            yield RedisSubscription(pubsub)

    async def close(self) -> None:
        async with self.answering():
            await self._redis.aclose()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """A deadline, and StoreError for whatever goes wrong."""
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                yield
        except (RedisError, OSError, ValueError, RuntimeError) as error:  # TimeoutError is an OSError; uvloop says RuntimeError of a reset
            raise StoreError(f"redis: {type(error).__name__}: {error}") from error


def whole_ms(seconds: float) -> int:
    """In milliseconds, at least one."""
    return max(1, round(seconds * 1000))
