"""News in Redis: a channel."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backend.registry.news import Hearing
from backend.registry.redis_link import RedisLink

CHANNEL = "midstream:news"


class RedisNews:
    """What is told travels with everything else that is asked at the moment; who listens has a connection of his own."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def tell(self, text: str) -> None:
        await self._link.tell(CHANNEL, text)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[Hearing]:
        async with self._link.subscription(CHANNEL) as hearing:
            yield hearing
