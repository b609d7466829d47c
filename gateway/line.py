"""The line as one gateway stands in it. A request's place is in the store, its connection waits here.

Whenever memory may have been freed, a gateway with requests in line takes a view of the cluster and of the whole line, has the policy bind,
and carries out the bindings of its own requests, each by one atomic claim; what the others' requests are to get counts as taken. A claim
that fails was late: look again. Without a store each gateway serves its own requests, in order.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from random import Random
from zlib import crc32

from backend.registry.line import LineLimits, LineSight, Passage, Standing, Ticket
from backend.registry.store import Candidate, StoreError
from gateway.decisions import DecisionLog
from gateway.errors import PatienceOver, QueueFull
from gateway.ledger import Ledger, Place
from gateway.line_pace import LinePace
from gateway.metrics import Metrics
from gateway.policy.config import Policy
from gateway.policy.decision import Bind
from gateway.policy.line import Binding, LineView, Waiting, demand_tokens
from gateway.policy.view import ClusterView, InstanceView, RequestView
from gateway.settings import GatewaySettings
from gateway.suspects import Suspects
from migration.leg import InstanceId, RequestId

DECIDING_SHARE = 3.0
"""For each second of deciding, so many without: a long line costs bindings some delay and not the whole gateway."""
FIRST_GUESS_TOKENS = 256.0
GUESS_WEIGHT = 0.01
"""Of one answer, in the running mean of their lengths."""
GUESS_STEP_TOKENS = 8.0
"""The mean is told in steps: what is computed from it need not be computed anew for each answer."""
NO_LIMITS = LineLimits(None, 2**53)

log = logging.getLogger("midstream.gateway.line")


@dataclass(eq=False, slots=True)
class Waiter:
    """A request of this gateway in line. `until_s` is when its patience ends."""

    place: Place
    ticket: Ticket
    request: RequestView
    joined_s: float
    until_s: float
    bound: asyncio.Future[InstanceView]

    def is_open(self, now_s: float) -> bool:
        """Whether it still waits."""
        return not self.bound.done() and now_s < self.until_s


class Line:
    """Owned by the app; `keep`, `hear` and `renew` run beside it. `choosing` is held while a gateway makes a choice, so that its choices
    do not conflict among themselves."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        suspects: Suspects,
        settings: GatewaySettings,
        clock: Callable[[], float],
        metrics: Metrics,
        decisions: DecisionLog,
    ) -> None:
        self._decisions = decisions
        self._ledger = ledger
        self._policy = policy
        self._suspects = suspects
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._waiters: dict[RequestId, Waiter] = {}
        self._moved = asyncio.Event()
        self._pace = LinePace(ledger, policy, clock)
        self.choosing = asyncio.Lock()
        self.expected_output_tokens = self._mean_output_tokens = FIRST_GUESS_TOKENS

    # -- what others ask

    def length(self, tier: str) -> int:
        """How many requests of this gateway and that tier are in line."""
        return sum(waiter.ticket.tier == tier for waiter in self._waiters.values())

    def oldest_s(self, tier: str) -> float:
        """How long the oldest of them has been there; 0 if there is none."""
        since_s = min((waiter.joined_s for waiter in self._waiters.values() if waiter.ticket.tier == tier), default=inf)
        return max(0.0, self._clock() - since_s)

    def waiting_tokens(self, model: str | None) -> int:
        """Prompt tokens of this gateway's requests that wait for that model; None: for any."""
        return sum(waiter.ticket.tokens for waiter in self._waiters.values() if model in (None, waiter.ticket.line))

    def holds_back(self, line: str, rank: int) -> bool:
        """Whether a newcomer of that rank has requests of this gateway before it."""
        return any(waiter.ticket.line == line and waiter.ticket.rank <= rank for waiter in self._waiters.values())

    def note_answer(self, tokens: int) -> None:
        """An answer is complete, and was so long."""
        self._mean_output_tokens += GUESS_WEIGHT * (tokens - self._mean_output_tokens)
        self.expected_output_tokens = GUESS_STEP_TOKENS * max(1, round(self._mean_output_tokens / GUESS_STEP_TOKENS))

    async def wait(self, place: Place, request: RequestView, line: str, *, again: bool = False) -> InstanceView:
        """Stand in line until the request is bound. Raises QueueFull, PatienceOver. Whoever stops waiting is forgotten at once.

        `again`: it ran before, and its tier's patience, whatever the tier, begins anew."""
        waiter = self._waiter(place, request, line, again=again)
        in_line = True
        try:
            in_line = await self._join(waiter)
            self._waiters[place.request] = waiter
            self._show(place.tier)
            self._moved.set()
            async with asyncio.timeout(None if waiter.until_s == inf else max(0.0, waiter.until_s - self._clock())):
                return await waiter.bound
        except TimeoutError:
            after_s = await self._pace.ask_retry_after_s(waiter.ticket)
            raise PatienceOver(f"No instance had room within {waiter.until_s - waiter.joined_s:.3g} s.", retry_after_s=after_s) from None
        except QueueFull:
            in_line = False
            raise
        finally:
            self._waiters.pop(place.request, None)
            self._show(place.tier)
            queued_s = self._clock() - waiter.joined_s
            place.queued_s += queued_s
            self._metrics.line.queued_s.labels(place.tier).observe(queued_s)
            if in_line and place.instance is None:
                with suppress(StoreError):
                    await self._ledger.ask(lambda: self._ledger.line.leave(place.request))

    # -- the loops

    async def keep(self) -> None:
        """Bind, for ever, whenever it may be possible."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.line_poll_s if self._waiters else None):
                    await self._moved.wait()
            self._moved.clear()
            decided_s = 0.0
            try:
                for tier in {waiter.ticket.tier for waiter in self._waiters.values()}:
                    self._show(tier)
                for line in sorted({waiter.ticket.line for waiter in self._waiters.values()}):
                    decided_s += await self.bind(line)
            except Exception:  # the root of a task; one bad round must not end the line
                log.exception("looking at the line failed")
            await asyncio.sleep(max(self._settings.line_interval_s, DECIDING_SHARE * decided_s))

    async def hear(self) -> None:
        """Listen, for ever, for what makes it worth looking. Without it there is still the poll."""
        while True:
            try:
                async with self._ledger.line.listen() as bell:
                    self._moved.set()
                    while True:
                        await bell.wait()
                        self._moved.set()
            except StoreError as error:
                log.debug("the store's bell is broken: %r", error)
            except Exception:  # the root of a task
                log.exception("listening to the store failed")
            await asyncio.sleep(self._settings.store_retry_s)

    async def renew(self) -> None:
        """Keep the places of those that wait, for ever."""
        while True:
            await asyncio.sleep(self._settings.line_ttl_s / 3)
            try:
                await self.renew_once()
            except StoreError:
                continue  # counted and logged by ask; next time
            except Exception:  # the root of a task
                log.exception("renewing places in line failed")

    async def renew_once(self) -> None:
        """One round of `renew`; places the store has lost are taken anew. Raises StoreError."""
        if waiting := list(self._waiters):
            missing = await self._ledger.ask(lambda: self._ledger.line.renew(waiting, self._settings.line_ttl_s))
            if missing:
                self._moved.set()  # the look tells those that were shed from those that were lost
            for line in {self._waiters[request].ticket.line for request in missing if request in self._waiters}:
                sight = await self._ledger.ask(lambda line=line: self._ledger.line.look(line, 0))  # type: ignore[misc]
                await self._settle(sight, [request for request in missing if request not in sight.shed])

    async def bind(self, line: str) -> float:
        """Look once, and carry out what is this gateway's. Answers how long deciding took, in seconds."""
        async with self.choosing:
            began_s = self._clock()
            sight, cluster = await self._look(line)
            view = LineView(
                [self._waiting(standing, cluster) for standing in sight.standings],
                now_s=0.0,
                ahead=sight.ahead,
                expected_output_tokens=self.expected_output_tokens,
            )
            # The same view gives the same bindings in every gateway: fewer claims are lost.
            seed = crc32(f"{sight.bound}-{view.waiting[0].view.request}".encode()) if view.waiting else 0
            looked_s = self._clock()
            bindings = self._policy.line.bind(view, cluster, Random(seed))
            decided_s = self._clock() - looked_s
            if made := await self._carry_out(bindings, cluster, line):
                self._decisions.note(Bind(view, self._policy.line, cluster, seed, tuple(bindings)), made)
            self._metrics.dispatch_s.observe(self._clock() - began_s)
        return decided_s

    # -- inside

    def _show(self, tier: str) -> None:
        self._metrics.line.show(tier, self.length(tier), self.oldest_s(tier))

    def _waiter(self, place: Place, request: RequestView, line: str, *, again: bool) -> Waiter:
        tier = self._policy.tiers.find(place.tier)
        now_s = self._clock()
        ticket = Ticket(
            place.request,
            line,
            self._settings.gateway_id,
            tier.name,
            self._policy.rank_of(tier.name),
            place.tokens,
            tuple(sorted(request.excluded)),
            again,
        )
        until_s = now_s + tier.patience_s - place.queued_s if tier.sheddable else inf
        if again:
            until_s = now_s + tier.patience_s
        return Waiter(place, ticket, request, now_s, until_s, asyncio.get_running_loop().create_future())

    async def _join(self, waiter: Waiter) -> bool:
        """Take a place. False: there is no store to take it in. Raises QueueFull."""
        tiers, ticket = self._policy.tiers, waiter.ticket
        tier = tiers.find(ticket.tier)
        limits = LineLimits(tier.queue_limit if tier.sheddable else None, self._settings.line_limit, tiers.shed_for(tier))
        try:
            joined = await self._ledger.ask(lambda: self._ledger.line.join(ticket, limits, self._settings.line_ttl_s))
        except StoreError:
            return False
        if not joined:
            raise QueueFull(
                f"As many requests of tier '{tier.name}' wait as may. Try again later.",
                retry_after_s=await self._pace.ask_retry_after_s(ticket),
            )
        return True

    async def _look(self, line: str) -> tuple[LineSight, ClusterView]:
        """The line and the cluster. Sees to those of ours whose place is gone."""
        mine = [waiter for waiter in self._waiters.values() if waiter.ticket.line == line]
        mine.sort(key=lambda waiter: (waiter.ticket.rank, waiter.joined_s))
        cluster = await self._ledger.view(0.0)
        if mine:
            cluster = self._suspects.without(cluster, mine[0].request)
        try:
            sight = await self._ledger.ask(lambda: self._ledger.line.look(line, self._settings.line_window))
        except StoreError:
            now_s = self._clock()
            return LineSight([Standing(each.ticket, now_s - each.joined_s) for each in mine], {}, 0, 0, frozenset()), cluster
        self._pace.see(line, sight)
        if len(sight.standings) < self._settings.line_window:
            seen = {standing.ticket.request for standing in sight.standings}
            lost = [each.ticket.request for each in mine if each.ticket.request not in seen | sight.shed]
        else:
            lost = []
        await self._settle(sight, lost)
        return sight, cluster

    async def _settle(self, sight: LineSight, lost: Sequence[RequestId]) -> None:
        """Refuse those that were shed, and line those up again that the store has lost."""
        for request in sight.shed & self._waiters.keys():
            waiter = self._waiters[request]
            after_s = self._pace.retry_after_s(waiter.ticket, sight)
            if not waiter.bound.done():
                waiter.bound.set_exception(
                    QueueFull("A more urgent request got the place in line. Try again later.", retry_after_s=after_s)
                )
        for request in lost:
            lost_one = self._waiters.get(request)
            if lost_one is not None and not lost_one.bound.done():
                ticket = lost_one.ticket
                with suppress(StoreError):
                    await self._ledger.ask(lambda ticket=ticket: self._ledger.line.join(ticket, NO_LIMITS, self._settings.line_ttl_s))  # type: ignore[misc]
                self._moved.set()

    def _waiting(self, standing: Standing, cluster: ClusterView) -> Waiting:
        ticket = standing.ticket
        view = RequestView(
            ticket.request,
            ticket.line or None,
            ticket.tier,
            ticket.tokens,
            frozenset(ticket.excluded),
            expected_output_tokens=self.expected_output_tokens,
        )
        return Waiting(view, demand_tokens(view, cluster), -standing.waited_s, ticket.again, ticket.rank)

    async def _carry_out(self, bindings: Sequence[Binding], cluster: ClusterView, line: str) -> Sequence[InstanceId]:
        """Claim for ours, all at once; answers the instances that were claimed.

        The policy counts everybody's bindings as claims, so a claim is good with as many as that, or fewer if others were not made yet.
        """
        now_s = self._clock()
        mine = [(waiter, binding) for binding in bindings if (waiter := self._waiters.get(binding.request)) and waiter.is_open(now_s)]
        async with asyncio.TaskGroup() as group:
            claims = [group.create_task(self._bind_one(waiter, binding, cluster, line)) for waiter, binding in mine]
        made = [instance for claim in claims if (instance := claim.result()) is not None]
        if len(made) < len(mine):
            self._moved.set()
        return made

    async def _bind_one(self, waiter: Waiter, binding: Binding, cluster: ClusterView, line: str) -> InstanceId | None:
        view = cluster.find(binding.instance)
        candidates = (Candidate(binding.instance, binding.claims_seen),)
        passage = Passage(line, waiter.ticket.rank, binding.ahead)
        if view is None or not await self._ledger.take(waiter.place, candidates, passage):
            return None
        if waiter.bound.done():  # it left while we asked
            await self._ledger.give_back(waiter.place)
            return None
        waiter.bound.set_result(view)
        return view.id
