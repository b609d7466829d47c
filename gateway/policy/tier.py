"""PURE. SLO tiers: how urgent a request is, as values of the settings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

MAX_RANK = 1000
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class Tier:
    """One class of requests.

    `rank` orders queues (lower first, from 0). `weight` is what one step's delay of such a request counts beside others'. A request
    that has waited `patience_s`, or that finds `queue_limit` of its tier waiting, is refused if the tier is `sheddable`.
    The objectives are what attainment is measured against.
    """

    name: str
    rank: int
    weight: float = 1.0
    queue_limit: int = 1000
    patience_s: float = 60.0
    sheddable: bool = True
    ttft_objective_s: float = 5.0
    tpot_objective_s: float = 0.2

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"'{self.name}' is no name of a tier: lower-case letters, digits, '_' and '-' are, 32 at most")
        if not 0 <= self.rank <= MAX_RANK or self.weight <= 0 or self.queue_limit < 0 or self.patience_s <= 0:
            raise ValueError(f"tier '{self.name}': rank 0 to {MAX_RANK}, weight > 0, queue_limit >= 0 and patience_s > 0 are needed")
        if self.ttft_objective_s <= 0 or self.tpot_objective_s <= 0:
            raise ValueError(f"tier '{self.name}': objectives > 0 are needed")


HIGH = Tier("high", 0, 20.0, 1000, 60.0, sheddable=False, ttft_objective_s=1.0, tpot_objective_s=0.1)
NORMAL = Tier("normal", 1, 1.0, 1000, 60.0)
BATCH = Tier("batch", 2, 0.2, 10_000, 600.0, ttft_objective_s=60.0, tpot_objective_s=1.0)


@dataclass(frozen=True, slots=True)
class Tiers:
    """All tiers of a gateway. `default` names the one that requests without a known tier belong to.

    Raises ValueError if two share a name, or the default is none of them.
    """

    tiers: tuple[Tier, ...] = (HIGH, NORMAL, BATCH)
    default: str = "normal"

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names) or self.default not in names:
            raise ValueError(f"tiers {names} need different names and the default '{self.default}'")

    def find(self, name: str) -> Tier:
        """That tier; the default one if there is none of that name."""
        fallback = None
        for tier in self.tiers:
            if tier.name == name:
                return tier
            if tier.name == self.default:
                fallback = tier
        assert fallback is not None
        return fallback

    def knows(self, name: str) -> bool:
        """True if there is a tier of that name."""
        return any(tier.name == name for tier in self.tiers)

    @property
    def most_urgent(self) -> Tier:
        """The tier of the lowest rank."""
        return min(self.tiers, key=lambda tier: tier.rank)

    @property
    def least_urgent(self) -> Tier:
        """The tier of the highest rank."""
        return max(self.tiers, key=lambda tier: tier.rank)

    def shed_for(self, tier: Tier) -> tuple[str, ...]:
        """The tiers whose waiting requests may be refused so that one of this tier can wait: less urgent and sheddable, last first."""
        lower = sorted((each for each in self.tiers if each.rank > tier.rank and each.sheddable), key=lambda each: -each.rank)
        return tuple(each.name for each in lower)


_FIELDS = {
    "rank": (int,),
    "weight": (int, float),
    "queue_limit": (int,),
    "patience_s": (int, float),
    "sheddable": (bool,),
    "ttft_objective_s": (int, float),
    "tpot_objective_s": (int, float),
}


def override_tiers(changes: Mapping[str, Mapping[str, object] | None], default: str) -> Tiers:
    """The built-in tiers with these changes: some fields of one, a new one (which needs a `rank`), or None to do without one.

    Raises ValueError that names what is wrong.
    """
    known = {tier.name: tier for tier in Tiers().tiers}
    assert set(_FIELDS) == {field.name for field in fields(Tier)} - {"name"}
    for name, change in changes.items():
        if change is None:
            known.pop(name, None)
            continue
        for key, value in change.items():
            if key not in _FIELDS:
                raise ValueError(f"tier '{name}': unknown key '{key}'; known: {', '.join(_FIELDS)}")
            if not isinstance(value, _FIELDS[key]) or (isinstance(value, bool) and bool not in _FIELDS[key]):
                raise ValueError(f"tier '{name}': '{key}' cannot be {value!r}")
        if name not in known and "rank" not in change:
            raise ValueError(f"tier '{name}' is new and needs a 'rank'")
        known[name] = replace(known.get(name) or Tier(name, 0), **change)  # type: ignore[arg-type]
    return Tiers(tuple(known.values()), default)
