"""PURE. SLO tiers: how urgent a request is, as values of the settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """One class of requests.

    `rank` orders queues (lower first). `weight` is what one step's delay of such a request counts beside others'. A request that has
    waited `patience_s`, or that finds `queue_limit` of its tier waiting, may be refused if the tier is `sheddable`.
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
        if not self.name or self.weight <= 0 or self.queue_limit < 0 or self.patience_s <= 0:
            raise ValueError(f"tier '{self.name}': a name, weight > 0, queue_limit >= 0 and patience_s > 0 are needed")


HIGH = Tier("high", 0, 10.0, 1000, 60.0, sheddable=False, ttft_objective_s=1.0, tpot_objective_s=0.1)
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
