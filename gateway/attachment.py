"""The stream of a request at the instance it is about to move to, opened before it moves."""

import asyncio

from gateway.control import Moving
from gateway.errors import UpstreamBroken, UpstreamFailed, UpstreamSilent, UpstreamUnreachable
from gateway.upstream import Upstream, UpstreamResponse
from migration.leg import InstanceId, Leg, RequestId

RETRY_S = 0.05


class Attached:
    """The attachment of one relay, while it has one."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._attachment: Attachment | None = None

    @property
    def epoch(self) -> int | None:
        """The attachment's; None if there is none."""
        return self._attachment.leg.epoch if self._attachment else None

    def open(self, request: RequestId, moving: Moving, tasks: asyncio.TaskGroup) -> None:
        """Attach, in place of what there was."""
        self.drop()
        self._attachment = Attachment(self._upstream, request, moving, tasks)

    async def take(self, timeout_s: float) -> tuple[UpstreamResponse, Leg, InstanceId]:
        """The open stream of the attachment that there is, which is the caller's from now on. Raises UpstreamFailed."""
        attachment = self._attachment
        assert attachment is not None
        response = await attachment.take(timeout_s)
        self._attachment = None
        return response, attachment.leg, attachment.instance

    def drop(self) -> None:
        """Idempotent."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None


class Attachment:
    """Attaches at once, in a task of the relay's group. What the instance says is held, up to a bound, by the connection itself.

    `close` must be called, by whoever opened it, unless `take` has given the response away.
    """

    def __init__(self, upstream: Upstream, request: RequestId, moving: Moving, tasks: asyncio.TaskGroup) -> None:
        self.leg = Leg(request, moving.epoch)
        self.instance: InstanceId = moving.instance
        self._url = moving.url
        self._upstream = upstream
        self._tasks = tasks
        self._opening = tasks.create_task(self._open())

    async def take(self, timeout_s: float) -> UpstreamResponse:
        """The open stream; it is the caller's from now on. A refusal is asked again, for the request may only just have got there.

        Raises UpstreamFailed.
        """
        failure: UpstreamFailed = UpstreamSilent(f"The request's new instance gave no stream within {timeout_s:g} s.")
        try:
            async with asyncio.timeout(timeout_s):
                first = True
                while isinstance(opened := await self._opening, UpstreamFailed):
                    failure = opened
                    if isinstance(failure, UpstreamUnreachable) and not first:
                        raise failure
                    await asyncio.sleep(0 if first else RETRY_S)
                    first = False
                    self._opening = self._tasks.create_task(self._open())
                return opened
        except TimeoutError:
            raise failure from None

    def close(self) -> None:
        """Idempotent. Tells the instance, if it has the request already, that nobody reads."""
        self._opening.cancel()
        if self._opening.done() and not self._opening.cancelled() and not isinstance(opened := self._opening.result(), UpstreamFailed):
            opened.close()

    async def _open(self) -> UpstreamResponse | UpstreamFailed:
        """Answers its failure: a move that is announced may still not take place."""
        try:
            response = await self._upstream.attach(self._url, self.leg)
        except UpstreamFailed as failure:
            return failure
        if response.status == 200 and response.is_event_stream:
            return response
        response.close()
        return UpstreamBroken(f"The request's new instance does not know it (status {response.status}).")
