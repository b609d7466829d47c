"""GET /v1/streams/{id}: a client that lost its gateway, or its connection, reads on. A relay that begins in the middle."""

from starlette.types import Scope

from gateway.access.caller import Caller
from gateway.composition import Composition
from gateway.downstream import Downstream
from gateway.errors import MethodNotAllowed
from gateway.headers import find_header
from gateway.relay import Relay
from gateway.resumable import read_seen
from migration.leg import RequestId

GATEWAY_LOST = "gateway_lost"
"""Why such an answer goes on at an instance anew, in metrics and events."""


class Reconnection(Relay):
    """What it was allowed, and what it costs, was settled when it began."""

    def __init__(self, parts: Composition, scope: Scope, client: Downstream, caller: Caller) -> None:
        super().__init__(parts, scope, client, caller)
        self._wanted = RequestId(scope["path_params"]["stream"])

    async def _admit(self) -> None:
        parts, headers = self._parts, tuple(self._scope["headers"])
        if self._scope["method"] != "GET":
            raise MethodNotAllowed("A stream is read on with GET.")
        await self._client.read_body(find_header(headers, b"content-length"), parts.settings.max_body_bytes, parts.settings.body_timeout_s)
        seen = read_seen(find_header(headers, b"last-event-id"))
        taken = await parts.streams.take_over(self._wanted, seen, self._caller.name, headers)
        self._request, self._keeper, self._asked = self._wanted, taken.keeper, taken.asked
        self._transcript, self._client.path = taken.transcript, taken.asked.path
        self._attempts.take_over(taken.epoch, GATEWAY_LOST, has_seen=seen.anything)
        parts.request_ids.issue(self._request)  # used up here, too
        await parts.ledger.free(self._request)
        self._client.ours += (*self._asked.told(self._request), (b"x-midstream-resumable", b"1"))
