"""Finds a request its instance. Whoever fits somewhere and has nobody before it goes there at once; the others wait in line.

Under a policy without a line everybody goes at once, to the first instance in its order that nobody else has gone to meanwhile.
"""

from collections.abc import Callable
from itertools import count
from random import Random

from backend.registry.line import Passage
from backend.registry.store import Candidate
from gateway.decisions import DecisionLog
from gateway.errors import ModelNotFound, NoInstance, NoOtherInstance, PatienceOver, QueueFull
from gateway.ledger import Ledger, Place
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.policy.config import Policy
from gateway.policy.decision import Bind, Dispatch
from gateway.policy.dispatch import is_served
from gateway.policy.line import Immediate, LineView, Waiting, demand_tokens
from gateway.policy.view import ClusterView, InstanceView, RequestView
from gateway.settings import GatewaySettings
from gateway.suspects import Suspects
from migration.leg import InstanceId

ALTERNATIVES = 15
"""Besides the best instance, so many more may be claimed in one round trip, if other gateways have been faster. All gateways find the same
ones best, so with few of them a claim often fails, and the gateway has to look and choose once more."""


class Dispatcher:
    """Owned by the app. Choices of one gateway are made one after the other, and each is counted before the store has answered, so that
    they do not conflict among themselves."""

    def __init__(
        self,
        ledger: Ledger,
        line: Line,
        policy: Policy,
        suspects: Suspects,
        settings: GatewaySettings,
        clock: Callable[[], float],
        metrics: Metrics,
        rng: Random,
        decisions: DecisionLog,
    ) -> None:
        self._ledger = ledger
        self._line = line
        self._policy = policy
        self._suspects = suspects
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._rng = rng
        self._decisions = decisions
        self._numbers = count(rng.randrange(2**16))

    async def choose(
        self,
        place: Place,
        model: str | None,
        excluded: frozenset[InstanceId],
        *,
        under_way: bool = False,
        in_line: bool = False,
        output_tokens: int = 0,
    ) -> InstanceView:
        """Put the request on an instance. Raises ModelNotFound, NoInstance, QueueFull, PatienceOver. The caller sets a deadline.

        One whose answer is `under_way` does not stand in line again, unless it is better off there (`in_line`), and is not refused there:
        its client reads already.
        """
        await self._ledger.seek(place, output_tokens)
        request = RequestView(place.request, model, place.tier, place.tokens, excluded, sequence=next(self._numbers))
        if (under_way and not in_line) or isinstance(self._policy.line, Immediate):
            return await self._choose_at_once(place, request)
        try:
            found = await self._pass(place, request)
            return found if isinstance(found, InstanceView) else await self._line.wait(place, request, found, again=under_way)
        except (QueueFull, PatienceOver):
            if not under_way:
                raise
        return await self._choose_at_once(place, request)

    async def choose_destination(self, source: InstanceId, request: RequestView) -> InstanceView:
        """The policy's best instance other than the source, without a claim. Raises NoOtherInstance."""
        whole = await self._ledger.view(0.0)
        cluster = ClusterView(tuple(view for view in whole.instances if view.can_move))
        order = self._policy.dispatch.order(request, cluster, self._rng)
        best = cluster.find(order[0].instance) if order else None
        if best is None:
            raise NoOtherInstance(f"No other instance can take a request from '{source}'.")
        return best

    def suspect(self, instance: InstanceId) -> None:
        """It could not be reached: for a while, use it only if there is no other."""
        self._suspects.add(instance)

    def trust(self, instance: InstanceId) -> None:
        """It has come back: use it again."""
        self._suspects.drop(instance)

    async def _choose_at_once(self, place: Place, request: RequestView) -> InstanceView:
        max_age_s = self._settings.view_max_age_s
        while True:
            began_s = self._clock()
            async with self._line.choosing:
                cluster = await self._ledger.view(max_age_s)
                seed, careful = self._rng.getrandbits(32), self._suspects.without(cluster, request)
                order = self._policy.dispatch.order(request, careful, Random(seed))
            if order and await self._ledger.take(place, order) and place.instance is not None:
                view = cluster.find(place.instance)
                if view is not None:
                    self._metrics.dispatch_s.observe(self._clock() - began_s)
                    self._decisions.note(Dispatch(request, self._policy.dispatch, careful, seed, tuple(order), view.id))
                    return view
            elif not order and max_age_s <= 0:
                raise _nobody(request.model, cluster)
            max_age_s = 0.0

    async def _pass(self, place: Place, request: RequestView) -> InstanceView | str:
        """Where it can go at once, or the line to stand in. Raises ModelNotFound, NoInstance."""
        began_s = self._clock()
        line, served = "", False
        for max_age_s in (self._settings.view_max_age_s, 0.0):
            async with self._line.choosing:
                cluster = await self._ledger.view(max_age_s)
                line = line_of(request.model, cluster)
                served = is_served(request, cluster)
                if not served:
                    continue
                if self._line.holds_back(line, self._policy.rank_of(place.tier)):
                    break
                bind = self._decide(request, self._suspects.without(cluster, request))
            view = await self._take(place, line, bind)
            if view is not None:
                self._metrics.dispatch_s.observe(self._clock() - began_s)
                return view
        if not served:
            raise _nobody(request.model, cluster)
        return line

    def _decide(self, request: RequestView, cluster: ClusterView) -> Bind:
        """Its place, without standing in line."""
        waiting = (Waiting(request, demand_tokens(request, cluster), 0.0),)
        view = LineView(waiting, 0.0, 0, self._line.expected_output_tokens, ALTERNATIVES)
        seed = self._rng.getrandbits(32)
        return Bind(view, self._policy.line, cluster, seed, tuple(self._policy.line.bind(view, cluster, Random(seed))))

    async def _take(self, place: Place, line: str, bind: Bind) -> InstanceView | None:
        """Claim what was decided, if it still can be had. Never ahead of room: how many are, only the line knows."""
        for binding in bind.bindings:
            candidates = (Candidate(binding.instance, binding.claims_seen), *binding.others)
            passage = Passage(line, self._policy.rank_of(place.tier))
            if not binding.ahead and await self._ledger.take(place, candidates, passage) and place.instance is not None:
                self._decisions.note(bind, (place.instance,))
                return bind.cluster.find(place.instance)
        return None


def line_of(model: str | None, cluster: ClusterView) -> str:
    """The line in which requests for that model wait: its name; where nothing else is served, that of requests without one, too."""
    if model is not None:
        return model
    models = {name for view in cluster.instances for name in view.report.models}
    return models.pop() if len(models) == 1 else ""


def _nobody(model: str | None, cluster: ClusterView) -> ModelNotFound | NoInstance:
    if cluster.instances and not cluster.knows_model(model):
        return ModelNotFound(f"The model '{model}' does not exist.", param="model")
    return NoInstance("No instance is ready to take this request. Try again in a moment.")
