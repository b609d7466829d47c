"""Responses that an instance stores, and which it is: a client asks for them by their ids, or goes on from them."""

import re

from gateway.composition import Composition
from gateway.stream_ends import RESPONSES
from migration.leg import InstanceId

_STORED = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')
_HEAD_BYTES = 4096


async def remember_response(parts: Composition, path: str, begun: bytes, instance: InstanceId) -> None:
    """A response that this instance may have stored, by the id that its answer begins with."""
    if path == RESPONSES and (found := _STORED.search(begun, 0, _HEAD_BYTES)):
        await parts.ledger.remember_holder(found[1].decode(), instance, parts.settings.response_ttl_s)
