"""Streams that their clients may go on reading, here or at another gateway: kept in the store while they run and for a while after.

begin ── Keeper writes the new tokens every quarter of a second ── the last ones when the stream ends, however it ends
take_over ── the client is back: one gateway, and one connection, gets the stream; the one that had it lets go
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from backend.registry.store import StoreError
from backend.registry.stream import KeptStream, StreamStore
from gateway.asked import Asked
from gateway.errors import RawHeaders, StoreUnavailable, StreamDiverged, StreamNotFound, StreamTaken, StreamUncertain
from gateway.keeper import Keeper, StoreKeeper, Unkept
from gateway.ledger import Ledger
from gateway.policy.tier import Tiers
from gateway.resumable import (
    EPOCHS_OF_A_TERM,
    KeptRequest,
    Seen,
    digest_of,
    from_document,
    to_document,
    wants_to_resume,
    why_not_kept,
)
from gateway.settings import GatewaySettings
from gateway.stream_ends import last_events
from gateway.transcript import Transcript
from migration.leg import RequestId

T = TypeVar("T")

LOOK_AGAIN_S = 0.05
"""Between two looks for what the gateway that had the stream has yet to write."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A stream that goes on here. `epoch` is the first that may be used."""

    asked: Asked
    transcript: Transcript
    epoch: int
    keeper: Keeper


class Streams:
    """Owned by the app."""

    def __init__(self, store: StreamStore, ledger: Ledger, settings: GatewaySettings, clock: Callable[[], float], tiers: Tiers) -> None:
        self._store = store
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._tiers = tiers
        self._live: dict[RequestId, StoreKeeper] = {}

    async def begin(self, request: RequestId, asked: Asked, key: str | None) -> tuple[Keeper, RawHeaders]:
        """Keep that stream, if its client wants it and it can be; and the answer's header that says so."""
        if not wants_to_resume(asked.headers):
            return Unkept(), ()
        reason = why_not_kept(asked.fields, len(asked.body), self._settings.resumable_max_body_bytes)
        if reason is None:
            stream = KeptStream(self._new_owner(), 1, to_document(asked, key))
            try:
                if await self._ledger.ask(lambda: self._store.begin(request, stream, self._settings.resumable_ttl_s)):
                    return self._keep(request, stream, Seen(), 0), _told("1")
                reason = "id_in_use"
            except StoreError:
                reason = "store"
        return Unkept(), _told(f"0; {reason}")

    async def take_over(self, request: RequestId, seen: Seen, key: str | None, headers: RawHeaders) -> TakenOver:
        """Make that stream ours, after the last event that its client has seen. Raises GatewayError."""
        kept, known = await self._find(request, key)
        if (keeper := self._live.get(request)) is not None:
            await self._wait_ended(keeper)
            kept, known = await self._find(request, key)
        if seen.tokens > len(kept.tokens) and not known.is_repeatable:
            kept = await self._wait_for_tokens(request, key, kept, seen.tokens)
        if seen.tokens <= len(kept.tokens) and digest_of(kept.tokens[: seen.tokens]) != seen.digest:
            raise StreamDiverged("The header last-event-id is not of an event of this stream.")
        owner = self._new_owner()
        term = await self._ask(lambda: self._store.take(request, kept.owner, owner, self._settings.resumable_ttl_s))
        if term is None or request in self._live or self._ledger.is_live(request):
            raise StreamTaken("Another connection reads this stream on.")
        asked = known.asked(headers, self._tiers)
        stream = KeptStream(owner, term, kept.request, kept.created)
        taken = self._keep(request, stream, seen, len(kept.tokens))
        transcript = Transcript.come_from_elsewhere(kept.tokens, seen.tokens, seen.sub, kept.created, last_events(asked.path))
        taken.follow(transcript)
        return TakenOver(asked, transcript, term * EPOCHS_OF_A_TERM, taken)

    def end(self, request: RequestId, keeper: Keeper) -> None:
        """The connection that read that stream is over, and everything let go."""
        keeper.ended.set()
        if self._live.get(request) is keeper:
            del self._live[request]

    async def _find(self, request: RequestId, key: str | None) -> tuple[KeptStream, KeptRequest]:
        kept = await self._ask(lambda: self._store.read(request))
        if kept is None:
            raise StreamNotFound(f"No stream '{request}' can be gone on with.")
        try:
            known = from_document(kept.request)
        except (ValueError, KeyError, TypeError) as error:
            raise StreamNotFound(f"No stream '{request}' can be gone on with.") from error
        if known.key != key:
            raise StreamNotFound(f"No stream '{request}' can be gone on with.")
        return kept, known

    async def _wait_ended(self, keeper: StoreKeeper) -> None:
        keeper.hand_over()
        try:
            async with asyncio.timeout(self._settings.resumable_wait_s):
                await keeper.ended.wait()
        except TimeoutError:
            raise StreamTaken("Another connection reads this stream, and does not end.") from None

    async def _wait_for_tokens(self, request: RequestId, key: str | None, kept: KeptStream, tokens: int) -> KeptStream:
        """The gateway that had the stream may be about to write them. Raises StreamUncertain."""
        until_s = self._clock() + self._settings.resumable_wait_s
        while len(kept.tokens) < tokens:
            if self._clock() >= until_s:
                raise StreamUncertain(
                    f"You have seen {tokens} tokens, of which {len(kept.tokens)} are known; without a seed the others would not come again."
                )
            await asyncio.sleep(LOOK_AGAIN_S)
            kept, _ = await self._find(request, key)
        return kept

    async def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Raises StoreUnavailable."""
        try:
            return await self._ledger.ask(question)
        except StoreError:
            raise StoreUnavailable("The shared store does not answer, and only there it is known how the stream goes on.") from None

    def _keep(self, request: RequestId, stream: KeptStream, seen: Seen, tokens: int) -> StoreKeeper:
        keeper = StoreKeeper(self._store, self._ledger, self._settings, self._clock, request, stream, seen, tokens)
        self._live[request] = keeper
        return keeper

    def _new_owner(self) -> str:
        return f"{self._settings.gateway_id}:{secrets.token_hex(8)}"


def _told(word: str) -> RawHeaders:
    return ((b"x-midstream-resumable", word.encode()),)
