"""The connection to Redis (6.2 and later, one primary), and the only importer of its client. Every operation is one script, hence atomic
and one round trip; time is Redis's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha1
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from backend.registry.redis_lane import Lane
from backend.registry.resp import Refusal, Reply, pack
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

    def __init__(self, link: "RedisLink", body: str) -> None:
        self._link = link
        self._body = body
        self._hash = sha1(body.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, *args: str | int) -> object:
        """Its answer. Raises StoreError."""
        answer = await self._link.ask(pack("EVALSHA", self._hash, 0, *args))
        if isinstance(answer, Refusal) and answer.text.startswith("NOSCRIPT"):
            answer = await self._link.ask(pack("EVAL", self._body, 0, *args))
        if isinstance(answer, Refusal):
            raise StoreError(f"redis: {answer.text}")
        return answer

    async def as_list(self, *args: str | int) -> list[Any]:
        """Its answer, a list. Raises StoreError."""
        answer = await self(*args)
        if not isinstance(answer, list):
            raise StoreError(f"expected a list from redis, got {type(answer).__name__}")
        return answer


class RedisSubscription:
    """One channel's messages."""

    def __init__(self, pubsub: PubSub) -> None:
        self._pubsub = pubsub

    async def wait(self) -> None:
        """Return when a message has come since the last call returned. Raises StoreError when the connection is gone."""
        await self.next()

    async def next(self) -> str:
        """What the next message says. Raises StoreError when the connection is gone."""
        now_s = asyncio.get_running_loop().time
        asked = False
        try:
            while True:
                began_s = now_s()
                if message := await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=HEARTBEAT_S):
                    return str(message["data"])
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

    A call cut off by a broken connection is repeated once at once: each script may safely run twice. All scripts share one connection.
    """

    def __init__(self, url: str, *, timeout_s: float = 1.0, max_connections: int = 16) -> None:
        self._timeout_s = timeout_s
        bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "decode_responses": True}
        once_more = Retry(NoBackoff(), 1)
        pool = BlockingConnectionPool.from_url(url, max_connections=max_connections, timeout=timeout_s, retry=once_more, **bounds)
        self._redis = Redis.from_pool(pool)
        self._lanes = ConnectionPool.from_url(url, protocol=2, **bounds)
        self._lane: Lane | None = None
        self._opening = asyncio.Lock()

    def script(self, body: str) -> RedisScript:
        """Known to the server by its hash from the first call on."""
        return RedisScript(self, body)

    async def ask(self, command: bytes) -> Reply:
        """The answer to a packed command, among those of others. Raises StoreError."""
        try:
            lane = self._lane
            if lane is None or lane.fault is not None:
                lane = await self._open_lane()
            try:
                return await lane.ask(command)
            except TimeoutError:
                raise
            except OSError:
                return await (await self._open_lane()).ask(command)
        except (RedisError, OSError, ValueError, RuntimeError) as error:  # TimeoutError is an OSError; uvloop says RuntimeError of a reset
            raise StoreError(f"redis: {type(error).__name__}: {error}") from error

    async def _open_lane(self) -> Lane:
        async with asyncio.timeout(self._timeout_s), self._opening:
            if self._lane is None or self._lane.fault is not None:
                connection = self._lanes.make_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.connect()
                    writer = connection._writer
                    assert writer is not None
                    self._lane = Lane(writer, self._timeout_s)
                    connection._reader = connection._writer = None  # the client's library has done its part: address, TLS, login
                finally:
                    await connection.disconnect(nowait=True)
            return self._lane

    async def put(self, key: str, value: str, ttl_s: float) -> None:
        async with self.answering():
            await self._redis.set(key, value, px=whole_ms(ttl_s))

    async def tell(self, channel: str, text: str) -> None:
        """To all who hear the channel. Raises StoreError."""
        answer = await self.ask(pack("PUBLISH", channel, text))
        if isinstance(answer, Refusal):
            raise StoreError(f"redis: {answer.text}")

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
            if self._lane is not None:
                await self._lane.close()
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
