"""PURE. From pairs and offers to what their sources are asked."""

from gateway.policy.rebalance import Offer, Pair, Reason, ReleaseStep
from gateway.policy.tier import Tiers
from migration.choice import Standing
from migration.question import Question, TierValue, Wanted

_WANTED = {Reason.MEMORY: Wanted.RELIEF, Reason.DRAINING: Wanted.LEAVE, Reason.QUEUE: Wanted.REQUEUE}


def pair_question(
    pair: Pair, source: Standing, destination: Standing, tiers: Tiers, *, ranked: bool, token: int = 0, cool_down_s: float = 0.0
) -> Question:
    """Whom does the pair's source give to its destination? Unless `ranked`, all tiers are equally urgent."""
    return Question(token, _WANTED[pair.reason], source, (destination,), _values(tiers, ranked), cool_down_s=cool_down_s)


def offer_question(offer: Offer, tiers: Tiers, *, ranked: bool, token: int = 0, cool_down_s: float = 0.0) -> Question:
    """What does the offer's source gain by whom?"""
    return Question(token, Wanted.TRADE, offer.source, offer.destinations, _values(tiers, ranked), offer.rule, cool_down_s)


def release_question(step: ReleaseStep, source: Standing, tiers: Tiers, *, ranked: bool, token: int = 0) -> Question:
    """Whom of its queue does it let go? (It is its own destination: nobody takes what goes back to the line.)"""
    return Question(token, Wanted.RELEASE, source, (source,), _values(tiers, ranked), least_tokens=step.least_tokens)


def _values(tiers: Tiers, ranked: bool) -> tuple[TierValue, ...]:
    ordered = sorted(tiers.tiers, key=lambda tier: tier.name != tiers.default)
    return tuple(TierValue(tier.name, tier.rank if ranked else 0, tier.weight) for tier in ordered)
