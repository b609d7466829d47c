"""One connection to Redis that many share: what they ask at the same moment goes out in one write, and answers come back in order.

No task and no timer for a call. Who stops waiting disturbs nobody: the answer is dropped when it comes.
"""

import asyncio
from collections import deque

from backend.registry.resp import Reply, ReplyReader


class Lane(asyncio.Protocol):
    """Takes over an open connection. Lost for good with the first fault; then all who wait hear of it, as an OSError."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer  # kept: its end would be the connection's
        self._transport = writer.transport
        self._former = self._transport.get_protocol()
        self._timeout_s = timeout_s
        self._replies = ReplyReader()
        self._pending: deque[tuple[asyncio.Future[Reply], float]] = deque()
        self._outgoing: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self.fault: OSError | None = None
        """Why it is lost, if it is."""
        self._transport.set_protocol(self)

    def ask(self, command: bytes) -> asyncio.Future[Reply]:
        """The answer to come. It fails with TimeoutError if none comes in time, with another OSError if the connection is lost."""
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if self.fault is not None:
            answer.set_exception(self.fault)
            return answer
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(command)
        now_s = self._loop.time()
        self._pending.append((answer, now_s))
        if self._timer is None:
            self._timer = self._loop.call_at(now_s + self._timeout_s, self._check)
        return answer

    async def close(self) -> None:
        """Give the connection back."""
        self._fail(ConnectionAbortedError("closed"))
        await self._lost.wait()

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except ValueError as error:
            self._fail(ConnectionError(str(error)))
            return
        for reply in replies:
            if not self._pending:
                self._fail(ConnectionError("redis answers what nobody asked"))
                return
            answer, _ = self._pending.popleft()
            if not answer.done():
                answer.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("redis closed the connection"))
        self._former.connection_lost(error)
        self._lost.set()

    def _flush(self) -> None:
        commands, self._outgoing = self._outgoing, []
        if self.fault is None:
            try:
                self._transport.write(b"".join(commands))
            except RuntimeError as error:  # uvloop says so of a connection that was reset a moment ago
                self._fail(ConnectionResetError(str(error)))

    def _check(self) -> None:
        """One timer for all: it goes by the oldest question."""
        self._timer = None
        if not self._pending:
            return
        due_s = self._pending[0][1] + self._timeout_s
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._check)
        else:
            self._fail(TimeoutError(f"no answer within {self._timeout_s:g} s"))

    def _fail(self, fault: OSError) -> None:
        if self.fault is not None:
            return
        self.fault = fault
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()
        for answer, _ in self._pending:
            if not answer.done():
                answer.set_exception(fault)
        self._pending.clear()
