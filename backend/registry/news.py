"""What gateways tell each other in passing: nothing is kept, and who does not listen at the moment misses it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

MOST_WAITING = 10_000
"""Texts that wait for one who listens and does not take them; after that the oldest are lost."""


class Hearing(Protocol):
    """One who listens."""

    async def next(self) -> str:
        """The next text told by anybody, itself included. Raises StoreError when it can hear no more."""


class NewsStore(Protocol):
    """The place where it is told."""

    async def tell(self, text: str) -> None:
        """To all who listen now. Raises StoreError; then some may have heard it."""

    def listen(self) -> AbstractAsyncContextManager[Hearing]:
        """Hears everything that is told while it lasts. Raises StoreError."""


class MemoryNews:
    """In one process."""

    def __init__(self) -> None:
        self._hearings: set[_Queue] = set()

    async def tell(self, text: str) -> None:
        for hearing in self._hearings:
            hearing.put(text)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[Hearing]:
        hearing = _Queue()
        self._hearings.add(hearing)
        try:
            yield hearing
        finally:
            self._hearings.discard(hearing)


class _Queue:
    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=MOST_WAITING)
        self._told = asyncio.Event()

    def put(self, text: str) -> None:
        self._texts.append(text)
        self._told.set()

    async def next(self) -> str:
        while not self._texts:
            self._told.clear()
            await self._told.wait()
        return self._texts.popleft()
