"""GET /midstream/streams/{request}: a gateway reads the stream of a request that arrived here."""

import asyncio

from starlette.types import Receive, Scope, Send

from backend.llumlet.buffer import Attachment, StreamBuffer
from backend.llumlet.outlet import EVENT_STREAM_HEAD
from backend.llumlet.wire import lost_event


async def serve_attachment(buffer: StreamBuffer, scope: Scope, receive: Receive, send: Send) -> None:
    """Send everything from the first event on; `lost` if the leg ends unfinished. A client that closes aborts the request."""
    attachment = buffer.attach()
    await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM_HEAD.headers)})
    async with asyncio.TaskGroup() as tasks:
        pump = tasks.create_task(_pump(attachment, send))
        left = tasks.create_task(_wait_disconnect(receive))
        await asyncio.wait([pump, left], return_when=asyncio.FIRST_COMPLETED)
        if not pump.done():
            buffer.leave(attachment)
        pump.cancel()
        left.cancel()
    if pump.cancelled():
        return
    if buffer.complete_for(attachment):
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": lost_event("dropped")})


async def _pump(attachment: Attachment, send: Send) -> None:
    while (data := await attachment.read()) is not None:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
