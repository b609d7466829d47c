"""Works on the operations, in whichever gateway holds the lease; so an operation goes on when the gateway that took the order is gone."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from backend.registry.lease import Lease
from gateway.errors import GatewayError
from gateway.ledger import Ledger
from gateway.scaling.book import Book
from gateway.scaling.hand import Finding, Hand, Scene
from gateway.scaling.launcher import Launcher, LauncherError
from gateway.scaling.news import News
from gateway.scaling.operation import IllegalEvent, Operation, Subject
from gateway.scaling.operations import Operations
from gateway.scaling.tenure import Tenure

log = logging.getLogger("midstream.gateway.scaling")

LEASE = "operations"


class Worker:
    """Owned by the app. Looks every `interval_s` while there is something to do, and at `wake`."""

    def __init__(
        self, operations: Operations, tenure: Tenure, hand: Hand, launcher: Launcher, ledger: Ledger, news: News, interval_s: float
    ) -> None:
        self._operations = operations
        self._tenure = tenure
        self._hand = hand
        self._launcher = launcher
        self._ledger = ledger
        self._news = news
        self._interval_s = interval_s

    async def keep(self) -> None:
        """Work, for ever."""
        try:
            while True:
                try:
                    await self.work()
                except GatewayError as error:
                    log.warning("operations have to wait: %s", error.message)
                except Exception:  # the root of a task; one bad round must not end all operations
                    log.exception("a round of work on the operations failed")
                await asyncio.sleep(self._interval_s)
        finally:
            await self._tenure.give_back()

    async def work(self) -> None:
        """One round. Raises StoreDown."""
        lease = await self._tenure.hold()
        if lease is None:
            return
        book = await self._operations.live()
        if not book.operations:
            return
        scene = await self._look(lease)
        async with asyncio.TaskGroup() as looks:
            tasks = [
                (operation, subject, looks.create_task(self._hand.look(operation, subject, scene)))
                for operation in book.operations
                for subject in operation.active
            ]
        found = [(operation, subject, task.result()) for operation, subject, task in tasks]
        for operation in await self._operations.change(self._noting(found)):
            if operation.state != "running":
                await self._operations.archive(operation)
                self._hand.forget(operation.id)
                self._news.ended(operation)

    async def _look(self, lease: Lease) -> Scene:
        cluster = await self._ledger.view(0.0)
        try:
            launched = {each.instance: each for each in await self._launcher.list()}
        except LauncherError as error:
            log.warning("the launcher does not tell what runs: %s", error)
            return Scene(cluster, None, lease.token)
        return Scene(cluster, launched, lease.token)

    def _noting(self, found: Sequence[tuple[Operation, Subject, Finding]]) -> Callable[[Book], tuple[Book, tuple[Operation, ...]]]:
        """The change that enters what was found. An instance that is not as it was looked at (somebody cancelled) is left for the next."""

        def note(book: Book) -> tuple[Book, tuple[Operation, ...]]:
            for operation, subject, finding in found:
                present = book.find(operation.id)
                if present is not None and present.find(subject.instance) == subject:
                    changed = self._entered(present, subject, finding)
                    book = book.changed(operation.id, lambda _, changed=changed: changed)  # type: ignore[misc]
            return book, book.operations

        return note

    def _entered(self, operation: Operation, subject: Subject, finding: Finding) -> Operation:
        if finding.requests:
            operation = operation.with_requests(finding.requests)
        if finding.event is None:
            return operation
        try:
            operation = operation.after(subject.instance, finding.event, self._operations.now, finding.note)
        except IllegalEvent:
            log.exception("an event out of place")
            return operation
        self._news.happened(operation.kind, finding.event)
        return operation.named(subject.instance, finding.named) if finding.named else operation
