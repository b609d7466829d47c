"""The id of each request: the client's own if it is sane and free, else a new one."""

import re
import secrets
from collections import OrderedDict

from migration.leg import RequestId

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REMEMBERED = 10_000


class RequestIds:
    """Issues ids. A client's id is used once: instances remember the legs of a request for a while after it has ended."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()

    def issue(self, wanted: str | None) -> RequestId:
        """The wanted id if it is sane and none of the last 10,000 that clients chose here, else `ms-` and 24 hex digits."""
        if wanted is None or not _SANE.fullmatch(wanted) or wanted in self._used:
            return RequestId(f"ms-{secrets.token_hex(12)}")
        self._used[wanted] = None
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        return RequestId(wanted)
