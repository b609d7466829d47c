"""One stream whose client may come back elsewhere: its events' ids, and its tokens in the store, as long as it is ours."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from backend.registry.store import StoreError
from backend.registry.stream import Appended, KeptStream, StreamStore
from gateway.errors import StreamDiverged, StreamTaken
from gateway.ledger import Ledger, Place
from gateway.resumable import Seen, digest_of, id_line
from gateway.settings import GatewaySettings
from gateway.sse import Event
from gateway.transcript import Mark, Transcript
from migration.leg import RequestId

QUIET_INTERVALS = 8
"""After so many without a new token the store is asked all the same: whether the stream is still ours."""


class Keeper(Protocol):
    """What a relay has beside it."""

    ended: asyncio.Event
    """The relay is over, and has let everything go."""

    @property
    def marks(self) -> Mark | None:
        """`mark`, if it changes anything."""

    def mark(self, event: Event, transcript: Transcript) -> bytes:
        """A new event as the client gets it. Raises StreamDiverged if what came before it is not what the client has seen."""

    def beside(self, transcript: Callable[[], Transcript], place: Place) -> Sequence[Coroutine[Any, Any, None]]:
        """To be run beside the relay, and cancelled. Raise StreamTaken, once another connection has the stream."""

    async def close(self, transcript: Transcript, place: Place) -> None:
        """The relay ends: keep what is new, if anything is kept."""


class Unkept:
    """The client cannot come back."""

    marks: Mark | None = None

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def mark(self, event: Event, transcript: Transcript) -> bytes:
        return event.raw

    def beside(self, transcript: Callable[[], Transcript], place: Place) -> Sequence[Coroutine[Any, Any, None]]:
        return ()

    async def close(self, transcript: Transcript, place: Place) -> None:
        """Nothing to do."""


class StoreKeeper:
    """Owned by one relay, which runs it beside itself. `seen`: what the client has seen elsewhere; `tokens`: how many are kept."""

    def __init__(
        self,
        store: StreamStore,
        ledger: Ledger,
        settings: GatewaySettings,
        clock: Callable[[], float],
        request: RequestId,
        stream: KeptStream,
        seen: Seen,
        tokens: int,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._request = request
        self._stream = stream
        self._digest = seen.digest
        self._unproven = seen.tokens
        self._tokens = tokens
        self._written_at_s = clock()
        self._transcript: Transcript | None = None
        self._wanted = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def marks(self) -> Mark | None:
        return self.mark

    def hand_over(self) -> None:
        """The client is back on another connection to this gateway: `run` ends the relay."""
        self._wanted.set()

    def mark(self, event: Event, transcript: Transcript) -> bytes:
        if self._unproven:
            if digest_of(transcript.ids_between(0, self._unproven)) != self._digest:
                raise StreamDiverged("The stream cannot be gone on with: computed again, its tokens are not those you have seen.")
            self._unproven = 0
        cursor = event.cursor
        if cursor is None:
            return event.raw
        if cursor.ids:
            self._digest = digest_of(cursor.ids, self._digest)
        return id_line(Seen(cursor.tokens, cursor.sub, self._digest)) + event.raw

    def follow(self, transcript: Transcript) -> None:
        """What is kept is of this transcript."""
        self._transcript = transcript

    def beside(self, transcript: Callable[[], Transcript], place: Place) -> Sequence[Coroutine[Any, Any, None]]:
        return (self.run(transcript, place),)

    async def run(self, transcript: Callable[[], Transcript], place: Place) -> None:
        """The new tokens are written at intervals."""
        while True:
            try:
                async with asyncio.timeout(self._settings.resumable_interval_s):
                    await self._wanted.wait()
                raise StreamTaken("Another connection reads this stream on.")
            except TimeoutError:
                pass
            if not await self.write(transcript()):
                self._ledger.forget(place)
                raise StreamTaken("Another connection reads this stream on.")

    async def close(self, transcript: Transcript, place: Place) -> None:
        if not await self.write(transcript):
            self._ledger.forget(place)

    async def write(self, transcript: Transcript) -> bool:
        """Keep what is new. False if another gateway has the stream; a store that does not answer gets it next time."""
        if self._transcript is not transcript:
            self._transcript, self._tokens = transcript, 0
        upto = self._tokens
        if transcript.contiguous and not transcript.forgotten:
            upto = max(upto, min(transcript.remembered, self._settings.resumable_max_tokens))
        if upto == self._tokens and self._clock() - self._written_at_s < QUIET_INTERVALS * self._settings.resumable_interval_s:
            return True
        ttl_s = self._settings.resumable_ttl_s
        try:
            answer = await self._append(transcript, self._tokens, upto)
            if answer is Appended.GONE and await self._ledger.ask(lambda: self._store.begin(self._request, self._stream, ttl_s)):
                answer = await self._append(transcript, 0, upto)
        except StoreError:
            return True
        if answer is Appended.KEPT:
            self._tokens, self._written_at_s = upto, self._clock()
        return answer is not Appended.TAKEN

    async def _append(self, transcript: Transcript, at: int, upto: int) -> Appended:
        """Raises StoreError."""
        tokens, created, ttl_s = transcript.ids_between(at, upto), transcript.created, self._settings.resumable_ttl_s
        return await self._ledger.ask(lambda: self._store.append(self._request, self._stream.owner, at, tokens, created, ttl_s))
