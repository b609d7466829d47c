"""The gate in front of OpenAI's routes: knows callers by their keys before anything of their bodies is read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Scope

from gateway.access.caller import Caller
from gateway.access.keyfile import KeyFile
from gateway.access.keys import bearer
from gateway.access.limiter import Limiter
from gateway.errors import BadApiKey, TooManyStreams
from gateway.headers import find_header


class Gate:
    """Without a file of keys it stands open. `tiers`: all there are, the highest first. `max_streams` 0: no limit."""

    def __init__(self, keys: KeyFile | None, limiter: Limiter, tiers: Sequence[str], max_streams: int) -> None:
        self._keys = keys
        self._limiter = limiter
        self._tiers = tiers
        self._max_streams = max_streams
        self._streams = 0

    def identify(self, scope: Scope) -> Caller:
        """Who asks. His key is taken out of the headers: it is for the gateway, and no instance needs to see it. Raises BadApiKey."""
        if self._keys is None:
            return Caller(None, self._limiter, self._tiers)
        named = b"authorization"
        secret = bearer(find_header(scope["headers"], named))
        if secret is None:
            named = b"x-api-key"  # Anthropic's clients
            secret = find_header(scope["headers"], named)
        if secret is None:
            raise BadApiKey("An API key is needed: authorization: Bearer KEY.")
        key = self._keys.table.find(secret)
        if key is None:
            raise BadApiKey("The API key is wrong.")
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != named]
        return Caller(key, self._limiter, self._tiers)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """One of the requests served at the same time, from its head on. Raises TooManyStreams."""
        if self._max_streams and self._streams >= self._max_streams:
            raise TooManyStreams(f"This gateway serves {self._max_streams} requests at the same time, and no more.")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1
