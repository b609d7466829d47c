"""Who asks, and what he may: one request's permission, from its first header to its last token."""

import math
from collections.abc import Sequence

from backend.registry.rates import Charge, Rate
from gateway.access.keys import ApiKey
from gateway.access.limiter import Limiter
from gateway.errors import ModelNotAllowed, RateLimited, TierNotAllowed

MINUTE_S = 60.0


class Caller:
    """The holder of a key, or, with none, anybody where no keys are needed. Made for one request."""

    def __init__(self, key: ApiKey | None, limiter: Limiter, tiers: Sequence[str]) -> None:
        self._key = key
        self._limiter = limiter
        self._tiers = tiers
        self._charged_tokens: int | None = None

    @property
    def name(self) -> str | None:
        """His key's name."""
        return self._key.name if self._key else None

    def may_see(self, model: str) -> bool:
        """Whether that model is for this caller."""
        return self._key is None or self._key.models is None or model in self._key.models

    async def begin(self) -> None:
        """Count the request; nothing of its body has been read. Raises RateLimited."""
        if self._key and self._key.requests_per_minute:
            await self._take("requests", 1, self._key.requests_per_minute)

    async def admit(self, model: str | None, tier: str, tokens: int) -> None:
        """Let the request go on to an instance, and charge what it may use. Raises ModelNotAllowed, TierNotAllowed, RateLimited."""
        key = self._key
        if key is None:
            return
        if key.models is not None and model not in key.models:
            named = f"The model '{model}'" if model is not None else "A request that names no model"
            raise ModelNotAllowed(f"{named} is not for this API key.", param="model")
        if key.highest_tier is not None and not self._is_within(tier, key.highest_tier):
            raise TierNotAllowed(f"The tier '{tier}' is above '{key.highest_tier}', the highest of this API key.")
        if key.tokens_per_minute:
            await self._take("tokens", tokens, key.tokens_per_minute)
            self._charged_tokens = tokens

    async def settle(self, used_tokens: int) -> None:
        """The request is over, and has used so many tokens, prompt and answer: make good what was charged too much or too little."""
        charged, self._charged_tokens = self._charged_tokens, None
        if self._key and self._key.tokens_per_minute and charged is not None and used_tokens != charged:
            await self._limiter.correct([self._charge("tokens", used_tokens - charged, self._key.tokens_per_minute)])

    def _is_within(self, tier: str, highest: str) -> bool:
        """A tier nobody knows is above all, and a highest one that nobody knows is below all."""
        ranks = {name: rank for rank, name in enumerate(self._tiers)}
        return ranks.get(tier, -1) >= ranks.get(highest, len(ranks) - 1)

    async def _take(self, what: str, amount: int, per_minute: int) -> None:
        wait_s = await self._limiter.take([self._charge(what, amount, per_minute)])
        if wait_s > 0:
            message = f"This API key is limited to {per_minute} {what} a minute. Come back in {math.ceil(wait_s)} s."
            raise RateLimited(message, reason=f"key_{what}", retry_after_s=math.ceil(wait_s))

    def _charge(self, what: str, amount: int, per_minute: int) -> Charge:
        assert self._key is not None
        return Charge(f"{self._key.name}:{what}", float(amount), Rate(per_minute / MINUTE_S, float(per_minute)))
