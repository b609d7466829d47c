"""PURE. The names of a streamed answer's parts, the same wherever the request runs.

The responses API names its items in every event, and tells all of them again at the end; vLLM draws those names by lot. A request that is
handled again elsewhere would go on under other ones. So what was drawn is replaced: the n-th name of an answer follows from the request's
id and n, on whichever instance. What the client itself has named is left alone.
"""

import re
from hashlib import sha256

_NAME = re.compile(rb'"(?:id|item_id)":\s*"([a-z]+_)([0-9a-f]{16,32})"')
_CALL = re.compile(rb'"call_id":\s*"((?:[a-z]+_|chatcmpl-tool-)?)([0-9a-f]{16,32}|[0-9A-Za-z]{9})"')
"""Drawn at random: hexadecimal digits behind a prefix; or, for models of Mistral's, nine letters and digits."""


class Names:
    """Those of one answer. Within a text its quotes would be escaped, so no text is taken for a name."""

    def __init__(self, request: str, body: bytes) -> None:
        self._request = request
        self._body = body
        self._shown: dict[bytes, bytes] = {}

    def rename(self, data: bytes) -> bytes:
        """The same bytes with the names that are shown."""
        return _CALL.sub(self._replace, _NAME.sub(self._replace, data))

    def _replace(self, found: re.Match[bytes]) -> bytes:
        drawn = found[1] + found[2]
        shown = self._shown.get(drawn)
        if shown is None:
            shown = self._shown[drawn] = drawn if drawn in self._body else found[1] + self._made(len(found[2]))
        whole, start = found[0], found.start()
        return whole[: found.start(1) - start] + shown + whole[found.end(2) - start :]

    def _made(self, length: int) -> bytes:
        return sha256(f"{self._request}/{len(self._shown)}".encode()).hexdigest()[:length].encode()
