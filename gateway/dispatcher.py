"""Finds a request its instance: reads a view, asks the policy for an order, claims the first that is as it was seen."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

from gateway.decisions import DecisionLog
from gateway.errors import ModelNotFound, NoInstance, NoOtherInstance
from gateway.ledger import Ledger, Place
from gateway.policy.decision import Dispatch
from gateway.policy.dispatch import DispatchPolicy
from gateway.policy.view import ClusterView, InstanceView, RequestView
from gateway.settings import GatewaySettings
from migration.leg import InstanceId


class Dispatcher:
    """Owned by the app. Choices of one gateway are made one after the other, so that they do not conflict among themselves."""

    def __init__(
        self,
        ledger: Ledger,
        policy: DispatchPolicy,
        settings: GatewaySettings,
        clock: Callable[[], float],
        rng: Random,
        decisions: DecisionLog,
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._decisions = decisions
        self._choosing = asyncio.Lock()
        self._suspects: dict[InstanceId, float] = {}

    async def choose(self, place: Place, model: str | None, excluded: frozenset[InstanceId]) -> InstanceView:
        """Put the request on an instance. Raises ModelNotFound, NoInstance. The caller sets a deadline."""
        asked_s = self._clock()
        async with self._choosing:
            max_age_s = self._settings.view_max_age_s
            while True:
                cluster = await self._ledger.view(max_age_s)
                request = RequestView(place.request, model, place.tier, place.prompt_tokens, excluded)
                decision = self._decide(request, cluster)
                order = decision.order
                if order and await self._ledger.take(place, order) and place.instance is not None:
                    view = cluster.find(place.instance)
                    if view is not None:
                        self._decisions.note(replace(decision, chosen=view.id), took_s=self._clock() - asked_s)
                        return view
                elif not order and max_age_s <= 0:
                    raise _nobody(model, cluster)
                max_age_s = 0.0

    async def choose_destination(self, source: InstanceId, request: RequestView) -> InstanceView:
        """The policy's best instance other than the source, without a claim. Raises NoOtherInstance."""
        cluster = await self._ledger.view(0.0)
        order = self._policy.order(request, cluster, self._rng)
        best = cluster.find(order[0].instance) if order else None
        if best is None:
            raise NoOtherInstance(f"No other instance can take a request from '{source}'.")
        return best

    def suspect(self, instance: InstanceId) -> None:
        """It could not be reached: for a while, use it only if there is no other."""
        self._suspects[instance] = self._clock() + self._settings.suspect_s

    def _decide(self, request: RequestView, cluster: ClusterView) -> Dispatch:
        now_s = self._clock()
        self._suspects = {instance: until_s for instance, until_s in self._suspects.items() if until_s > now_s}
        seed = self._rng.getrandbits(32)
        careful = replace(request, excluded=request.excluded | frozenset(self._suspects))
        order = self._policy.order(careful, cluster, Random(seed))
        if not order and self._suspects:
            careful, order = request, self._policy.order(request, cluster, Random(seed))
        return Dispatch(careful, self._policy, cluster, seed, tuple(order))


def _nobody(model: str | None, cluster: ClusterView) -> ModelNotFound | NoInstance:
    if cluster.instances and not cluster.knows_model(model):
        return ModelNotFound(f"The model '{model}' does not exist.", param="model")
    return NoInstance("No instance is ready to take this request. Try again in a moment.")
