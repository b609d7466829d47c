"""PURE. Which tier a request asks for: our header, the headers of other gateways, or fields of the body, in this order.

Names are those of the tiers themselves or one of WORDS; numbers are above, at or below zero: more urgent, the default, less urgent
(bodies and vLLM count the other way round). What is not understood is the default tier, and a note for the client.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import RawHeaders
from gateway.headers import find_header
from gateway.openai import BodyFields
from gateway.policy.tier import Tier, Tiers

HEADERS = ("priority", "x-smg-priority", "x-dynamo-request-priority", "x-gateway-inference-objective")

_HEADERS = frozenset(name.encode() for name in HEADERS)

WORDS: dict[str, Callable[[Tiers], Tier]] = {
    **dict.fromkeys(("system", "interactive", "priority"), lambda tiers: tiers.most_urgent),
    **dict.fromkeys(("default", "auto", "standard_only"), lambda tiers: tiers.find(tiers.default)),
    **dict.fromkeys(("bulk", "flex"), lambda tiers: tiers.least_urgent),
}


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The tier, and what to tell a client that asked for something else."""

    tier: Tier
    note: str | None = None


def choose_tier(headers: RawHeaders, fields: BodyFields, tiers: Tiers) -> TierChoice:
    """The first of the places above that says anything decides."""
    if any(name in _HEADERS for name, _ in headers):
        return choose_tier_of_headers(headers, tiers)
    if fields.priority:
        return TierChoice(tiers.most_urgent if fields.priority < 0 else tiers.least_urgent)
    if fields.service_tier is not None:
        return _named(fields.service_tier, tiers, counts=False)
    return TierChoice(tiers.find(tiers.default))


def choose_tier_of_headers(headers: RawHeaders, tiers: Tiers) -> TierChoice:
    """As choose_tier, for a request whose body is not looked at."""
    for name in HEADERS:
        asked = find_header(headers, name.encode())
        if asked is not None:
            return _named(asked, tiers, counts=name not in ("priority", "x-smg-priority"))
    return TierChoice(tiers.find(tiers.default))


def _named(asked: str, tiers: Tiers, *, counts: bool) -> TierChoice:
    word = asked.strip().lower()
    if tiers.knows(word):
        return TierChoice(tiers.find(word))
    if word in WORDS:
        return TierChoice(WORDS[word](tiers))
    if counts and (number := _number(word)) is not None:
        return TierChoice(tiers.most_urgent if number > 0 else tiers.least_urgent if number < 0 else tiers.find(tiers.default))
    shown = "".join(c for c in word if c.isascii() and c.isprintable())[:40]
    known = ", ".join(tier.name for tier in tiers.tiers)
    return TierChoice(tiers.find(tiers.default), f"unknown priority '{shown}', served as {tiers.default}; known: {known}")


def _number(word: str) -> int | None:
    return int(word) if word.removeprefix("-").isascii() and word.removeprefix("-").isdigit() and len(word) < 20 else None
