"""The store as one gateway sees it: the last view of the cluster, and the places of its own live requests.

Every question to the store has a deadline. While the store fails, the gateway goes on with its last view and places requests without
claims; it counts them itself, and makes up for the claims when the store is back. What is not renewed expires in the store by itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from backend.registry.line import LineStore, Passage
from backend.registry.news import NewsStore
from backend.registry.store import Candidate, Claim, InstanceStore, Sighting, StoreError
from gateway.deadline import within
from gateway.metrics import Metrics
from gateway.policy.view import NO_DRIFT, ClusterView, Drift, assemble, view_of
from gateway.settings import GatewaySettings
from migration.leg import InstanceId, Leg, RequestId

T = TypeVar("T")

_HOLDER = "response"
"""The kind of record that says which instance stores a response."""

AGE_STEP_S = 0.02
"""Ages in a view are right to that; its claims are always right."""

log = logging.getLogger("midstream.gateway.ledger")


@dataclass(eq=False, slots=True)
class Place:
    """A live request and the instance that serves it. Mutable, changed by the ledger only."""

    request: RequestId
    tier: str
    prompt_tokens: int
    output_tokens: int = 0
    """That it had when it came to look for this instance."""
    instance: InstanceId | None = None
    claimed: bool = False
    """The store is known to hold a claim for it."""
    asked: bool = False
    """The store has been asked for a claim, and may hold one."""
    ahead: bool = False
    """It was claimed ahead of room, and has not started."""
    queued_s: float = 0.0
    """How long it has been in line, in all."""

    @property
    def tokens(self) -> int:
        """What it needs memory for, to start."""
        return self.prompt_tokens + self.output_tokens


class Ledger:
    """Owned by the app; used by all its relays."""

    def __init__(self, store: InstanceStore, settings: GatewaySettings, clock: Callable[[], float], metrics: Metrics) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._live: dict[RequestId, Place] = {}
        self._sightings: Sequence[Sighting] = ()
        self._looked_at_s = float("-inf")
        self._looking = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._looks = 0
        self._drift: dict[InstanceId, Drift] = {}
        self._since: dict[InstanceId, Drift] | None = None
        """While the store is being asked: what has come and gone since the question went out, which its answer does not know."""
        self._cluster = ClusterView()
        self._assembled_at_s = float("-inf")
        self._at: dict[InstanceId, int] = {}
        self._moved: set[InstanceId] = set()
        self._down = False
        self._retry_at_s = float("-inf")

    @property
    def is_store_up(self) -> bool:
        return not self._down

    def is_live(self, request: RequestId) -> bool:
        """True while this gateway serves a request of that id."""
        return request in self._live

    @asynccontextmanager
    async def place(self, request: RequestId, tier: str, prompt_tokens: int) -> AsyncIterator[Place]:
        """A request's place while it lives. Its claim is given back once, on leaving, whatever happened."""
        place = Place(request, tier, prompt_tokens)
        self._live[request] = place
        self._metrics.live.inc()
        try:
            yield place
        finally:
            del self._live[request]
            self._metrics.live.dec()
            await self.give_back(place)

    async def view(self, max_age_s: float) -> ClusterView:
        """The cluster as seen within the last `max_age_s`; older if the store does not answer. Who asks meanwhile shares the answer.

        What is not yet twice as old is good enough for who asks, and has the next look made beside him (`look_beside`).
        """
        age_s = self._clock() - self._looked_at_s
        if max_age_s < age_s <= 2 * max_age_s:
            self._wanted.set()
        elif age_s > max_age_s:
            looks = self._looks
            async with self._looking:
                if self._looks == looks and self._clock() - self._looked_at_s > max_age_s:
                    with suppress(StoreError):  # counted and logged by ask; the last view is better than none
                        await self._look()
        return self.last_view()

    async def look_beside(self) -> None:
        """Look again whenever somebody was content with a view that gets old, for ever."""
        while True:
            await self._wanted.wait()
            try:
                async with self._looking:
                    await self._look()
            except StoreError:
                pass  # counted and logged by ask; who needs a view looks by himself
            except Exception:  # the root of a task
                log.exception("a look at the cluster failed")
            self._wanted.clear()

    async def _look(self) -> None:
        self._since = {}
        self._looks += 1
        try:
            self._sightings = await self.ask(self._store.sightings)
            self._drift = self._since
        finally:
            self._since = None
        self._looked_at_s = self._clock()
        self._assembled_at_s = float("-inf")
        self._at = {sighting.report.instance: at for at, sighting in enumerate(self._sightings)}
        for place in self._live.values():
            if place.instance and not place.claimed:
                self._count(place.instance, place, 1)

    def last_view(self) -> ClusterView:
        """The cluster as it was last seen, and what this gateway has done since."""
        now_s = self._clock()
        aged_s, stale_s = max(0.0, now_s - self._looked_at_s), self._settings.report_stale_s
        if not 0 <= now_s - self._assembled_at_s < AGE_STEP_S:
            self._cluster = assemble(self._sightings, stale_s, aged_s, self._drift)
            self._assembled_at_s = now_s
        elif self._moved:
            views = list(self._cluster.instances)
            for at in (self._at[instance] for instance in self._moved if instance in self._at):
                sighting = self._sightings[at]
                views[at] = view_of(sighting, stale_s, aged_s, self._drift.get(sighting.report.instance, NO_DRIFT))
            self._cluster = ClusterView(tuple(views))
        self._moved.clear()
        return self._cluster

    @property
    def news(self) -> NewsStore:
        """What gateways tell each other in passing."""
        return self._store.news

    @property
    def line(self) -> LineStore:
        """Who waits for an instance; its questions go through `ask`."""
        return self._store.line

    async def take(self, place: Place, candidates: Sequence[Candidate], passage: Passage | None = None) -> bool:
        """Put the request on the first candidate with no more claims than were seen. False if there is none, or others come first: look.

        Without a store it is the first candidate, unclaimed.
        """
        if place.instance is not None:
            await self.give_back(place)
        first, instance = candidates[0].instance, None
        claim = self._claim(place, first)
        place.asked = True
        self._count(first, place, 1)  # at once: whoever chooses while the store answers has to see it
        look = self._looks
        try:
            instance = await self.ask(lambda: self._store.claim(claim, candidates, self._settings.claim_ttl_s, passage))
            place.claimed = instance is not None
        except StoreError:
            instance = first
        finally:
            if instance != first:
                self._count(first, place, -1, look)
                if instance is not None:
                    self._count(instance, place, 1, look)
        if instance is None:
            place.asked = False
            self._metrics.conflicts.inc()
            return False
        place.instance = instance
        place.ahead = place.claimed and passage is not None and passage.ahead
        return True

    async def started(self, place: Place) -> None:
        """The request has its first token: if it was claimed ahead of room, that is over."""
        if place.ahead:
            place.ahead = False
            try:
                await self.ask(lambda: self._store.line.started(place.request))
            except StoreError:
                return  # it ends with the claim

    async def move(self, place: Place, to: InstanceId) -> None:
        """The request has moved: count it there from now on."""
        if place.instance is not None:
            self._count(place.instance, place, -1)
        place.instance = to
        self._count(to, place, 1)
        try:
            place.claimed = await self.ask(lambda: self._store.move_claim(place.request, to))
        except StoreError:
            place.claimed = False

    async def keep(self) -> None:
        """Renew the claims of all live requests, for ever; make up for those that are missing."""
        while True:
            await asyncio.sleep(self._settings.claim_ttl_s / 3)
            try:
                await self.renew()
            except StoreError:
                continue  # counted and logged by ask; next time
            except Exception:  # the root of a task; claims must not run out because of one bad round
                log.exception("a round of renewals failed")

    async def renew(self) -> None:
        """One round of `keep`. Raises StoreError."""
        claimed = [place.request for place in self._live.values() if place.claimed]
        missing = await self.ask(lambda: self._store.renew(claimed, self._settings.claim_ttl_s)) if claimed else ()
        for request in missing:
            if request in self._live:
                self._live[request].claimed = False
        if unclaimed := [place for place in self._live.values() if place.instance and not place.claimed]:
            seen = {sighting.report.instance: sighting.claims for sighting in await self.ask(self._store.sightings)}
            for place in unclaimed:
                await self._restore(place, seen)

    async def claims(self) -> Sequence[Claim]:
        """All live claims of all gateways. Raises StoreError."""
        return await self.ask(self._store.claims)

    async def record_switch(self, leg: Leg, gap_ms: float) -> None:
        """Note the downtime a client saw; lost if the store does not answer."""
        try:
            await self.ask(lambda: self._store.record_switch(leg, gap_ms, self._settings.switch_ttl_s))
        except StoreError:
            return

    async def switch_gap_ms(self, leg: Leg) -> float | None:
        """The downtime the client of that leg saw, if any gateway has noted it."""
        try:
            return await self.ask(lambda: self._store.switch_gap_ms(leg))
        except StoreError:
            return None

    async def remember_holder(self, response: str, instance: InstanceId, ttl_s: float) -> None:
        """That instance stores this response; forgotten if the store does not answer."""
        try:
            await self.ask(lambda: self._store.records.write(_HOLDER, response, instance, version=0, ttl_s=ttl_s))
        except StoreError:
            return

    async def holder_of(self, response: str) -> InstanceId | None:
        """The instance that stores the response, if that is known."""
        try:
            record = await self.ask(lambda: self._store.records.read(_HOLDER, response))
        except StoreError:
            return None
        return InstanceId(record.text) if record else None

    def _claim(self, place: Place, instance: InstanceId) -> Claim:
        return Claim(place.request, instance, self._settings.gateway_id, place.tier, place.tokens)

    def _count(self, instance: InstanceId, place: Place, claims: int, look: int | None = None) -> None:
        """So many more. `look` is the look that was the last when the store was asked for what this corrects: one that began later
        was asked later, and knows."""
        change = claims * place.tokens
        self._moved.add(instance)
        self._drift[instance] = self._drift.get(instance, NO_DRIFT).plus(claims, change)
        if self._since is not None and look in (None, self._looks):
            self._since[instance] = self._since.get(instance, NO_DRIFT).plus(claims, change)

    def forget(self, place: Place) -> None:
        """Another gateway has the request, and its claim."""
        if place.instance is not None:
            self._count(place.instance, place, -1)
        place.instance, place.claimed, place.asked, place.ahead = None, False, False, False

    async def free(self, request: RequestId) -> None:
        """Give back the claim that another gateway may have left; it expires if the store does not answer."""
        try:
            await self.ask(lambda: self._store.release(request))
        except StoreError:
            return

    async def seek(self, place: Place, output_tokens: int) -> None:
        """It looks for an instance (again), with so many output tokens: it holds nothing meanwhile."""
        await self.give_back(place)
        place.output_tokens = output_tokens

    async def give_back(self, place: Place) -> None:
        """Also asked for a place that is not known to be claimed: the question may have arrived and its answer not."""
        instance, asked = place.instance, place.asked
        place.instance, place.claimed, place.asked, place.ahead = None, False, False, False
        if instance is not None:
            self._count(instance, place, -1)
        elif not asked:
            return
        try:
            await self.ask(lambda: self._store.release(place.request))
        except StoreError:
            return  # it expires

    async def _restore(self, place: Place, seen: dict[InstanceId, int]) -> None:
        """Claim what is unclaimed, on the instance where the request is; a conflict is left for the next round."""
        instance = place.instance
        if instance is None or instance not in seen:
            return
        candidate = Candidate(instance, seen[instance])
        claim = self._claim(place, instance)
        held = await self.ask(lambda: self._store.claim(claim, (candidate,), self._settings.claim_ttl_s))
        if self._live.get(place.request) is not place:  # it ended while we asked
            await self.ask(lambda: self._store.release(place.request))
            return
        if held is None:
            return
        now_at = place.instance
        if now_at is not None and held != now_at:
            await self.ask(lambda: self._store.move_claim(place.request, now_at))
        place.claimed = now_at is not None
        seen[instance] += 1

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Raises StoreError: the store failed, took too long, or did so a moment ago and is left alone."""
        if self._clock() < self._retry_at_s:
            raise StoreError("left alone after a failure")
        try:
            answer = await within(self._settings.store_timeout_s, question())
        except (StoreError, TimeoutError) as error:
            self._note_failure(error)
            raise StoreError("the store did not answer") from error
        if self._down:
            self._down = False
            self._metrics.store_up.set(1)
            log.info("the store answers again")
        return answer

    def _note_failure(self, error: Exception) -> None:
        self._retry_at_s = self._clock() + self._settings.store_retry_s
        self._metrics.store_errors.inc()
        self._metrics.store_up.set(0)
        if not self._down:
            self._down = True
            log.warning("the store does not answer, going on with the last view: %r", error)
