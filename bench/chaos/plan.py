"""PURE. What is done to the fleet, and when: all of it follows from the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

LONGEST_MOMENT_S = 1.0
"""Faults and moves happen within this time of the first streams' beginning; a stream takes a quarter of it up to more than all of it."""
SHORT_S, LONG_S = (0.1, 0.5), (2.5, 4.0)
"""How long a hang, a partition or an outage lasts: over before anyone gives up waiting, or not."""


class Fault(Enum):
    """Each is dealt equally often."""

    KILL_BACKEND = "kill_backend"
    STOP_BACKEND = "stop_backend"
    HANG_BACKEND = "hang_backend"
    PARTITION_BACKEND = "partition_backend"
    CUT_BACKEND = "cut_backend"
    DELAY_BACKEND = "delay_backend"
    KILL_GATEWAY = "kill_gateway"
    STOP_GATEWAY = "stop_gateway"
    HANG_GATEWAY = "hang_gateway"
    PARTITION_GATEWAY = "partition_gateway"
    KILL_REDIS = "kill_redis"
    HANG_REDIS = "hang_redis"
    FLUSH_REDIS = "flush_redis"
    SCALE_IN_AND_OUT = "scale_in_and_out"


MIGRATE = "migrate"
"""Moves are ordered in every iteration, and counted beside the faults."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One stream: which of the known requests, at which gateway, when."""

    request: int
    gateway: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """One move, of the stream of that number, to wherever the gateway likes."""

    stream: int
    gateway: int
    mode: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Iteration:
    """One fault, and what goes on around it. `target` counts backends or gateways; `lasts_s` is for what comes to an end."""

    number: int
    fault: Fault
    target: int
    at_s: float
    lasts_s: float
    asked: Sequence[Asked]
    ordered: Sequence[Ordered]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a fleet and its load."""

    backends: int
    gateways: int
    requests: int
    """How many different ones are known."""
    streams: int = 10
    moves: int = 2


def iterations(seed: int, count: int, sizes: Sizes) -> Iterator[Iteration]:
    """Faults are dealt from a shuffled deck, so that each comes as often as any other."""
    random = Random(seed)
    deck: list[Fault] = []
    for number in range(count):
        if not deck:
            deck = list(Fault)
            random.shuffle(deck)
        fault = deck.pop()
        asked = [
            Asked(random.randrange(sizes.requests), random.randrange(sizes.gateways), random.uniform(0, LONGEST_MOMENT_S / 2))
            for _ in range(sizes.streams)
        ]
        ordered = [
            Ordered(stream, random.randrange(sizes.gateways), random.choice(MODES), random.uniform(0.1, LONGEST_MOMENT_S))
            for stream in random.sample(range(sizes.streams), sizes.moves)
        ]
        targets = sizes.gateways if fault.value.endswith("gateway") else sizes.backends
        lasts_s = random.uniform(*random.choice((SHORT_S, LONG_S)))
        yield Iteration(number, fault, random.randrange(targets), random.uniform(0.1, LONGEST_MOMENT_S), lasts_s, asked, ordered)


MODES = ("live", "live", "stop_copy", "recompute")
