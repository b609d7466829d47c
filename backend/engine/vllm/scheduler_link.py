"""The API process's end of the wire to the scheduler: orders go as ADD requests, replies and news come over a socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from backend.engine.vllm import orders
from migration.errors import MigrationError, Refused, RequestEnded

R = TypeVar("R", orders.Done, orders.Standing, orders.Held)


class SchedulerLink:
    """Ask the scheduler; hear its news. Use inside `open()`."""

    def __init__(self, add_request: Callable[[EngineCoreRequest], Any], address: str, timeout_s: float) -> None:
        self._add_request = add_request
        self._address = address
        self._timeout_s = timeout_s
        self._orders = 0
        self._replies: dict[int, asyncio.Future[orders.Reply]] = {}

    @asynccontextmanager
    async def open(self, on_news: Callable[[orders.News], None]) -> AsyncIterator[None]:
        """Bind the socket, greet the scheduler, read until left."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PULL)
        try:
            socket.bind(self._address)
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(socket, on_news))
                await self.ask(lambda order: orders.Hello(order, self._address), orders.Done)
                yield
                reader.cancel()
        finally:
            socket.close(linger=0)
            context.term()

    async def ask(self, make: Callable[[int], orders.Order], expected: type[R]) -> R:
        """Send an order and return its reply. Raises RequestEnded, Refused(reason), MigrationError('scheduler_silent')."""
        self._orders += 1
        order = self._orders
        future: asyncio.Future[orders.Reply] = asyncio.get_running_loop().create_future()
        self._replies[order] = future
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._add_request(_as_request(order, make(order)))
                reply = await future
        except TimeoutError:
            raise MigrationError("the scheduler did not answer in time", reason="scheduler_silent") from None
        finally:
            del self._replies[order]
        if isinstance(reply, orders.Failed):
            raise RequestEnded() if reply.reason == "ended" else Refused(reason=reply.reason)
        assert isinstance(reply, expected)
        return reply

    async def _read(self, socket: zmq.asyncio.Socket, on_news: Callable[[orders.News], None]) -> None:
        while True:
            message = orders.decode(await socket.recv())
            if isinstance(message, orders.ShellHeld | orders.Load):
                on_news(message)
                continue
            future = self._replies.get(message.order)
            if future is not None and not future.done():
                future.set_result(message)


def _as_request(number: int, order: orders.Order) -> EngineCoreRequest:
    """An order dressed as a request: vLLM hands it to the scheduler, which never queues it."""
    return EngineCoreRequest(
        request_id=f"midstream-order-{number}",
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args={orders.EXTRA_ARG: orders.to_extra(order)}),
        pooling_params=None,
        arrival_time=time.time(),  # noqa: TID251  # the field's meaning in vLLM
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
