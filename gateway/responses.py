"""POST /v1/responses: relayed where another instance could go on with it exactly, else passed through."""

import json
from collections.abc import Mapping

from starlette.types import Scope

from gateway.access.caller import Caller
from gateway.composition import Composition
from gateway.downstream import Downstream
from gateway.errors import ClientLeft, GatewayError
from gateway.headers import find_header
from gateway.json_members import members
from gateway.passthrough import Passage
from gateway.relay import Relay
from gateway.request_log import RequestEntry

_OF_THE_CLIENT = ("function", "custom", "namespace")
"""The types of tools that a client calls itself. Others an engine calls, and then asks its model once more."""


def is_relayed(body: bytes) -> bool:
    """Whether all that an answer depends on is in the request: it runs in the foreground, goes on from no stored response, and no tool is
    the engine's. What is not understood is not."""
    try:
        return all(_is_plain(member.name, body[member.start : member.end]) for member in members(body))
    except (ValueError, RecursionError):
        return False


def _is_plain(name: str, value: bytes) -> bool:
    if name == "background":
        return value in (b"false", b"null")
    if name == "previous_response_id":
        return value == b"null"
    if name != "tools":
        return True
    tools = json.loads(value) or []
    return isinstance(tools, list) and all(isinstance(tool, Mapping) and tool.get("type") in _OF_THE_CLIENT for tool in tools)


class ResponsesExchange:
    """One request, whichever way it takes."""

    def __init__(self, parts: Composition, scope: Scope, client: Downstream, caller: Caller) -> None:
        self._parts, self._scope, self._client, self._caller = parts, scope, client, caller
        self._taken: Relay | Passage = Passage(parts, scope, client, caller)

    @property
    def tier(self) -> str:
        return self._taken.tier

    @property
    def outcome(self) -> str:
        return self._taken.outcome

    @outcome.setter
    def outcome(self, outcome: str) -> None:
        self._taken.outcome = outcome

    @property
    def used_tokens(self) -> int:
        """What it has cost its caller so far."""
        return self._taken.used_tokens

    def end(self) -> RequestEntry | None:
        """It is over; answers what the request log gets, if anything."""
        return self._taken.end()

    async def serve(self) -> None:
        """Serve the request to its end. Errors are shown to the client; only a client that left is no error."""
        settings, declared = self._parts.settings, find_header(tuple(self._scope["headers"]), b"content-length")
        try:
            body = await self._client.read_body(declared, settings.max_body_bytes, settings.body_timeout_s)
        except ClientLeft:
            self.outcome = "client_left"
        except GatewayError as error:
            self.outcome = error.reason
            await self._client.fail(error)
        else:
            if is_relayed(body):
                self._taken = Relay(self._parts, self._scope, self._client, self._caller)
            await self._taken.serve()
