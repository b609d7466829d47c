"""Moves running requests by itself: one gateway at a time, under a lease, by the policy's rules.

    keep ─ for ever: hold the lease; every interval, while it is held, a round
      _round ─ one view; for each pool of instances: pairs, then offers, then grants (gateway/policy/rebalance.py)
        _work_on ─ a pair: ask its source for a request, order its move, again as long as the pair holds
        _grant ─ one move that a source offered
      _let_go ─ more often: have instances offer what waits there for memory it has lost (policy/rebalance.py, ReleaseStep)

Which request moves is the source's choice (migration/question.py): a round costs nothing that grows with the number of requests.
Orders carry the lease's token. Before the first order of a term every instance of the pool is told the token, and refuses from then on the
orders of whoever had the lease before. An order under way when the lease is lost is carried out to its end; no other follows. At most
one move out and one in per instance. Without the store nothing moves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from backend.registry.lease import LeaseStore
from gateway.composition import Composition
from gateway.decisions import Moving, Releasing
from gateway.errors import GatewayError, UpstreamBroken, UpstreamDeclined, UpstreamFailed
from gateway.mover import conclude, order
from gateway.policy.budget import Budget
from gateway.policy.config import Policy
from gateway.policy.decision import Pairing, Release, Trade, pair_up, release_from
from gateway.policy.load import standing
from gateway.policy.question import offer_question, pair_question, release_question
from gateway.policy.rebalance import Grant, Offer, Pair, Reason, pools
from gateway.policy.view import ClusterView, InstanceView, ViewState
from gateway.term import Office, Term
from migration.choice import Move
from migration.leg import InstanceId
from migration.plan import Destination, MigrationMode, MigrationOutcome, MigrationPlan, MigrationResult
from migration.question import Answer, Question

LEASE = "rebalance"
STALE_TOKEN = 409
NEWS_S = 0.2
"""What both instances of a pair get, after a move, to report what it has changed."""
NEWS_POLL_S = 0.01

_ABLE = (ViewState.READY, ViewState.DRAINING)

log = logging.getLogger("midstream.gateway.rebalancer")


class Rebalancer:
    """Owned by the app's lifespan: run `keep` there."""

    def __init__(self, parts: Composition, leases: LeaseStore, policy: Policy) -> None:
        settings = parts.settings
        self._parts = parts
        self._policy = policy
        self._rules = policy.rebalancing
        self._office = Office(
            LEASE,
            settings.gateway_id,
            leases,
            ttl_s=settings.rebalance_lease_ttl_s,
            timeout_s=settings.store_timeout_s,
            clock=parts.clock,
        )
        self._cool_down_s = max(self._rules.cool_down_s, settings.rebalance_cool_down_s)
        self._out: set[InstanceId] = set()
        self._in: set[InstanceId] = set()
        self._silent: dict[InstanceId, float] = {}
        """Instances that did not answer, and until when they are left alone for it."""
        self._budget = Budget(0.0)

    async def keep(self) -> None:
        """Hold the lease whenever it is free, and move requests while it is held; for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._office.keep())
                if self._rules.release is not None:
                    tasks.create_task(self._repeat(self._rules.release.interval_s, self._release_round))
                await self._repeat(self._rules.interval_s, lambda term: self._round(term, tasks))
        finally:
            self._parts.metrics.leading.set(0)

    async def _repeat(self, interval_s: float, act: Callable[[Term], Awaitable[None]]) -> None:
        """While the lease is held, for ever."""
        while True:
            await asyncio.sleep(interval_s)
            term = self._office.term
            self._parts.metrics.leading.set(term is not None)
            if term is None:
                continue
            try:
                await act(term)
            except Exception:  # one bad round must not end them all
                log.exception("a round of rebalancing failed")

    async def _round(self, term: Term, tasks: asyncio.TaskGroup) -> None:
        cluster = await self._parts.ledger.view(0.0)
        if not self._parts.ledger.is_store_up:
            return
        now_s = self._parts.clock()
        self._silent = {instance: until_s for instance, until_s in self._silent.items() if until_s > now_s}
        self._budget = replace(self._budget, per_s=self._rules.moves_per_instance_s * len(cluster.instances))
        for pool in pools(cluster):
            able = self._able(pool)
            if len(able.instances) > 1:
                await self._rebalance(term, able, tasks)

    def _able(self, pool: ClusterView) -> ClusterView:
        """Those that can be asked for something."""
        return ClusterView(tuple(view for view in pool.instances if view.state in _ABLE and view.can_move and view.id not in self._silent))

    async def _rebalance(self, term: Term, pool: ClusterView, tasks: asyncio.TaskGroup) -> None:
        pairs = pair_up(self._rules, pool)
        busy_out, busy_in = self._busy(pool)
        offers: Sequence[Offer] = ()
        if self._rules.price is not None:
            sources = frozenset(pair.source for pair in pairs)
            offers = self._rules.price.offers(pool, busy_out | sources, busy_in | {pair.destination for pair in pairs})
        if not pairs and not offers:
            return
        if not await self._fence(term, pool):
            return
        for pair in pairs:
            if pair.source not in busy_out and pair.destination not in busy_in and self._take(pair.source, pair.destination):
                tasks.create_task(self._guarded(partial(self._work_on, term, pair, pool, tasks), pair.source, pair.destination))
        trade = await self._trade(term, offers, pool)
        for grant in trade.grants:
            if self._take(grant.source, grant.move.destination):
                tasks.create_task(self._guarded(partial(self._grant, term, grant, trade, tasks), grant.source, grant.move.destination))

    def _busy(self, pool: ClusterView) -> tuple[frozenset[InstanceId], frozenset[InstanceId]]:
        """Who gives, and who takes, already: as they report, or as ordered here and not reported yet."""
        leaving = (view.id for view in pool.instances if view.report.migrations_out)
        coming = (view.id for view in pool.instances if view.report.migrations_in)
        return frozenset(leaving) | self._out, frozenset(coming) | self._in

    def _take(self, source: InstanceId, destination: InstanceId) -> bool:
        """Reserve both for one move at a time."""
        if source in self._out or destination in self._in:
            return False
        self._out.add(source)
        self._in.add(destination)
        return True

    async def _guarded(self, work: Callable[[], Awaitable[None]], source: InstanceId, destination: InstanceId) -> None:
        """The root of the task that has taken these two."""
        try:
            await work()
        except GatewayError as error:
            if isinstance(error, UpstreamDeclined) and error.answered == STALE_TOKEN:
                self._office.resign()  # another gateway has the lease, whatever this one believes
            log.warning("moving from %s to %s: %s", source, destination, error)
        except Exception:
            log.exception("moving from %s to %s failed", source, destination)
        finally:
            self._out.discard(source)
            self._in.discard(destination)

    # ------------------------------------------------------------------ releases

    async def _release_round(self, term: Term) -> None:
        cluster = await self._parts.ledger.view(self._parts.settings.view_max_age_s)
        if not self._parts.ledger.is_store_up:
            return
        for pool in pools(cluster):
            able = self._able(pool)
            why = Release(self._rules, able, release_from(self._rules, able))
            if why.sources and await self._fence(term, able):
                async with asyncio.TaskGroup() as asking:
                    for source in why.sources:
                        asking.create_task(self._let_go(term, _known(able, source), why))

    async def _let_go(self, term: Term, source: InstanceView, why: Release) -> None:
        """Have it offer to their gateways what waits there for memory it has lost."""
        assert self._rules.release is not None
        tiers = self._policy.tiers
        question = release_question(self._rules.release, standing(source, tiers), tiers, ranked=self._policy.ranked, token=term.token)
        try:
            moves = await self._ask(source, question, "release")
        except UpstreamFailed as error:
            log.info("%s did not offer what waits there: %s", source.id, error)
            return
        if moves:
            self._parts.decisions.note(Releasing(tuple(move.request for move in moves), question.source, why))

    # ------------------------------------------------------------------ pairs

    async def _work_on(self, term: Term, pair: Pair, pool: ClusterView, tasks: asyncio.TaskGroup) -> None:
        """Move one request after the other, until the pair's reason is gone, or a move comes to nothing."""
        seen: ClusterView | None = pool
        while seen is not None and self._office.may_act(term):
            source, destination = _known(seen, pair.source), _known(seen, pair.destination)
            tiers = self._policy.tiers
            question = pair_question(
                pair,
                standing(source, tiers),
                standing(destination, tiers),
                tiers,
                ranked=self._policy.ranked,
                token=term.token,
                cool_down_s=self._cool_down_s,
            )
            moves = await self._ask(source, question)
            if not moves:
                return
            why = Pairing(self._rules, seen, pair_up(self._rules, seen))
            moving = Moving(moves[0], question.source, question.destinations[0], pair.reason, why)
            if not await self._carry_out(term, moving, source, destination, tasks):
                return
            seen = await self._still_holding(pair, source, destination)

    async def _still_holding(self, pair: Pair, *before: InstanceView) -> ClusterView | None:
        """Both instances as they report themselves after the move, if they still make that pair; else None."""
        until_s = self._parts.clock() + NEWS_S
        old = {view.id: view.report.sequence for view in before}
        while True:
            cluster = await self._parts.ledger.view(0.0)
            views = tuple(view for view in cluster.instances if view.id in old)
            told = all(view.report.sequence != old[view.id] for view in views)
            if len(views) < 2 or not self._parts.ledger.is_store_up:
                return None
            if told or self._parts.clock() >= until_s:
                break
            await asyncio.sleep(NEWS_POLL_S)
        both = ClusterView(views)
        return both if any((each.source, each.reason) == (pair.source, pair.reason) for each in pair_up(self._rules, both)) else None

    # ------------------------------------------------------------------ prices

    async def _trade(self, term: Term, offers: Sequence[Offer], pool: ClusterView) -> Trade:
        """Ask all at once; the best of what they offer is granted."""
        async with asyncio.TaskGroup() as asking:
            asked = [(offer.source.instance, asking.create_task(self._ask_offer(term, offer, pool))) for offer in offers]
        answers = tuple((source, tuple(task.result())) for source, task in asked)
        grants = self._rules.price.grants(dict(answers)) if self._rules.price is not None else ()
        return Trade(self._rules, pool, answers, tuple(grants))

    async def _ask_offer(self, term: Term, offer: Offer, pool: ClusterView) -> Sequence[Move]:
        question = offer_question(offer, self._policy.tiers, ranked=self._policy.ranked, token=term.token, cool_down_s=self._cool_down_s)
        try:
            return await self._ask(_known(pool, offer.source.instance), question)
        except UpstreamFailed as error:
            log.info("%s did not say what it would give: %s", offer.source.instance, error)
            return ()

    async def _grant(self, term: Term, grant: Grant, trade: Trade, tasks: asyncio.TaskGroup) -> None:
        source, destination = _known(trade.cluster, grant.source), _known(trade.cluster, grant.move.destination)
        tiers = self._policy.tiers
        moving = Moving(grant.move, standing(source, tiers), standing(destination, tiers), Reason.PRICE, trade)
        await self._carry_out(term, moving, source, destination, tasks)

    # ------------------------------------------------------------------ instances

    async def _fence(self, term: Term, pool: ClusterView) -> bool:
        """Tell all who have not been told the token. False if the lease is another's by now."""
        new = [view for view in pool.instances if view.id not in term.fenced]
        async with asyncio.TaskGroup() as telling:
            told = [(view.id, telling.create_task(self._tell_token(term, view))) for view in new]
        term.fenced |= {instance for instance, task in told if task.result()}
        return self._office.may_act(term)

    async def _tell_token(self, term: Term, view: InstanceView) -> bool:
        """Whether it knows now. One that does not gives nothing."""
        try:
            await self._post(view, "fence", {"token": term.token})
        except UpstreamFailed as error:
            log.info("%s did not take the token of this term: %s", view.id, error)
            return False
        return True

    async def _ask(self, source: InstanceView, question: Question, what: str = "choices") -> Sequence[Move]:
        """The moves it offers, to destinations that were offered. Raises UpstreamFailed."""
        raw = await self._post(source, what, question.to_json())
        try:
            answer = Answer.from_json(raw)
        except ValueError as error:
            raise UpstreamBroken("The instance's answer is not a choice.") from error
        offered = {each.instance for each in question.destinations}
        return [move for move in answer.moves if move.destination in offered]

    async def _post(self, view: InstanceView, what: str, body: object) -> object:
        """Raises UpstreamFailed; an instance that does so is left alone for a while."""
        try:
            return await self._parts.upstream.post_json(
                f"{view.report.url}/midstream/{what}", body, self._parts.settings.rebalance_timeout_s
            )
        except UpstreamFailed as error:
            if isinstance(error, UpstreamDeclined) and error.answered == STALE_TOKEN:
                self._office.resign()  # another gateway has the lease, whatever this one believes
            else:
                self._silent[view.id] = self._parts.clock() + self._parts.settings.suspect_s
            raise

    async def _carry_out(
        self, term: Term, moving: Moving, source: InstanceView, destination: InstanceView, tasks: asyncio.TaskGroup
    ) -> bool:
        """Whether it has moved. Raises UpstreamFailed."""
        budget = self._budget.spend(self._parts.clock())
        if budget is None or not self._office.may_act(term) or source.id not in term.fenced:
            return False
        self._budget = budget
        reason = moving.reason
        waits = reason is Reason.QUEUE
        mode = MigrationMode.RECOMPUTE if waits else MigrationMode.LIVE
        plan = MigrationPlan(moving.move.request, Destination(destination.id, destination.report.url), mode, only_waiting=waits)
        self._parts.decisions.note(moving)
        outcome = await order(self._parts, plan, source, reason=reason.value, token=term.token)
        tasks.create_task(self._conclude(plan, source, outcome, reason))
        return outcome.result is MigrationResult.MOVED

    async def _conclude(self, plan: MigrationPlan, source: InstanceView, outcome: MigrationOutcome, reason: Reason) -> None:
        """The root of the task that tells how a move ended."""
        try:
            await conclude(self._parts, plan, source, outcome, reason=reason.value)
        except Exception:
            log.exception("telling of the move of %s failed", plan.request)


def _known(cluster: ClusterView, instance: InstanceId) -> InstanceView:
    view = cluster.find(instance)
    if view is None:
        raise UpstreamFailed(f"{instance} has left.")
    return view
