"""The operations in the shared store: every gateway orders and reads them, whoever holds the lease works on them.

One record holds all that are not over (book.py), changed by compare-and-set; each that is over has a record of its own, which expires.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from backend.registry.record import RecordStore
from backend.registry.store import StoreError
from gateway.scaling.book import Book
from gateway.scaling.errors import OperationNotFound, OrderConflict, StoreDown
from gateway.scaling.operation import IllegalEvent, Operation, OperationKind, Subject
from migration.leg import InstanceId

T = TypeVar("T")

LIVE_KIND, LIVE_NAME = "operations", "live"
OVER_KIND = "operation"
LIVE_TTL_S = 7 * 24 * 3600.0
TRIES = 20
"""Of one change, each after somebody else's."""


class Operations:
    """`now` tells the time in UTC, ISO 8601; `new_name` makes a word never used before, after a prefix. All methods raise StoreDown."""

    def __init__(
        self,
        records: RecordStore,
        *,
        keep_s: float,
        store_timeout_s: float,
        now: Callable[[], str],
        new_name: Callable[[str], str],
    ) -> None:
        self._records = records
        self._keep_s = keep_s
        self._store_timeout_s = store_timeout_s
        self._now = now
        self._new_name = new_name

    @property
    def now(self) -> str:
        """As steps are stamped with."""
        return self._now()

    async def order_out(self, count: int, model: str | None, origin: str) -> Operation:
        """A new operation that starts so many instances."""
        names = [InstanceId(self._new_name("i")) for _ in range(count)]
        return await self._order(OperationKind.SCALE_OUT, names, model, origin)

    async def order_in(self, instances: Sequence[InstanceId], origin: str) -> Operation:
        """A new operation that stops these; or the one that stops one of them already."""
        return await self._order(OperationKind.SCALE_IN, instances, None, origin)

    async def live(self) -> Book:
        """All that are not over."""
        record = await self._ask(lambda: self._records.read(LIVE_KIND, LIVE_NAME))
        return Book.from_json(record.text) if record else Book()

    async def all(self) -> Sequence[Operation]:
        """Those that are not over and those that are not forgotten, the newest first."""
        over = await self._ask(lambda: self._records.read_all(OVER_KIND))
        known = {each.id: each for each in (Operation.from_json(record.text) for record in over.values())}
        known |= {each.id: each for each in (await self.live()).operations if each.id not in known}
        return sorted(known.values(), key=lambda each: (each.created, each.id), reverse=True)

    async def find(self, operation: str) -> Operation:
        """Raises OperationNotFound."""
        found = (await self.live()).find(operation)
        if found is None:
            record = await self._ask(lambda: self._records.read(OVER_KIND, operation))
            if record is None:
                raise OperationNotFound(f"There is no operation '{operation}'.")
            found = Operation.from_json(record.text)
        return found

    async def cancel(self, operation: str) -> Operation:
        """Undo what can be undone. Raises OperationNotFound, OrderConflict."""
        await self.find(operation)
        try:
            await self.change(lambda book: (book.changed(operation, lambda each: each.cancelled(self._now())), None))
        except (IllegalEvent, KeyError) as error:
            message = "Nothing of it can be cancelled any more: it is over, or its process was told to stop."
            raise OrderConflict(message, "not_cancellable") from error
        return await self.find(operation)

    async def archive(self, operation: Operation) -> None:
        """It is over: take it out of the book, and keep it for a while."""
        record = await self._ask(lambda: self._records.read(OVER_KIND, operation.id))
        if record is None:
            text = operation.to_json()
            await self._ask(lambda: self._records.write(OVER_KIND, operation.id, text, version=0, ttl_s=self._keep_s))
        await self.change(lambda book: (book.without(operation.id), None))

    async def change(self, change: Callable[[Book], tuple[Book, T]]) -> T:
        """Apply a change to the book as it is now; answers what `change` does. Whatever it raises leaves the book as it was."""
        for _ in range(TRIES):
            record = await self._ask(lambda: self._records.read(LIVE_KIND, LIVE_NAME))
            book = Book.from_json(record.text) if record else Book()
            changed, answer = change(book)
            if changed == book:
                return answer
            version, text = record.version if record else 0, changed.to_json()
            if await self._write(text, version):
                return answer
        raise StoreDown("Too many orders at a time. Try again in a moment.")

    async def _write(self, text: str, version: int) -> bool:
        return await self._ask(lambda: self._records.write(LIVE_KIND, LIVE_NAME, text, version=version, ttl_s=LIVE_TTL_S))

    async def _order(self, kind: OperationKind, instances: Sequence[InstanceId], model: str | None, origin: str) -> Operation:
        subjects = tuple(Subject(instance) for instance in instances)
        operation = Operation(self._new_name("op"), kind, origin, self._now(), model, subjects)
        return await self.change(lambda book: book.ordered(operation))

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._store_timeout_s):
                return await question()
        except (StoreError, TimeoutError) as error:
            raise StoreDown("The shared store does not answer; nothing was ordered.") from error
