"""The port to shared state, and what it guarantees. Two implementations with one test suite: Redis and memory.

Guarantees
- Time is the store's own (Redis TIME, or the clock given to the memory store): hosts' clocks are never compared.
- A report lives `ttl_s` after it was published, then it is gone. Reports of one incarnation never go backwards: a lower sequence
  number is ignored; another incarnation replaces.
- A claim exists at most once per request, counts on exactly one instance, and expires by itself unless renewed.
- `claim`, `move_claim` and `release` are atomic; releasing twice, or what never was, changes nothing.
- A request in line is claimed once, and leaves the line in the same step (line.py).
- Every failure of the store is a StoreError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backend.registry.instance import LoadReport
from backend.registry.lease import LeaseStore
from backend.registry.line import LineStore, Passage
from backend.registry.news import NewsStore
from backend.registry.rates import RateStore
from backend.registry.record import RecordStore
from backend.registry.stream import StreamStore
from migration.leg import InstanceId, Leg, RequestId


class StoreError(Exception):
    """The store cannot be reached, timed out, or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's place on an instance, held by the gateway that relays it."""

    request: RequestId
    instance: InstanceId
    gateway: str
    tier: str
    tokens: int
    """The estimate of the prompt's length, in tokens."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A report as the store has it: its age, and the live claims on its instance."""

    report: LoadReport
    age_s: float
    claims: int
    claimed_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance a policy chose, with the number of claims that it saw there when it chose: more may not have come since."""

    instance: InstanceId
    claims_seen: int


class InstanceStore(Protocol):
    """Shared state of all gateways and backends."""

    @property
    def leases(self) -> LeaseStore:
        """Who may act."""

    @property
    def records(self) -> RecordStore:
        """Documents that outlive their writers."""

    @property
    def streams(self) -> StreamStore:
        """What another gateway needs to go on with a client's stream."""

    @property
    def news(self) -> NewsStore:
        """What gateways tell each other in passing."""

    @property
    def rates(self) -> RateStore:
        """How much of something may be used a second."""

    @property
    def line(self) -> LineStore:
        """Who waits for an instance."""

    async def publish(self, report: LoadReport, ttl_s: float, *, urgent: bool = False) -> None:
        """Make the report the instance's latest. An urgent one, and an instance's first, makes those in line look again."""

    async def withdraw(self, instance: InstanceId) -> None:
        """The instance leaves: forget its report (claims on it stay until released or expired)."""

    async def sightings(self) -> Sequence[Sighting]:
        """Every unexpired report, ordered by instance id, in one round trip."""

    async def claim(self, claim: Claim, candidates: Sequence[Candidate], ttl_s: float, passage: Passage | None = None) -> InstanceId | None:
        """Compare, choose, reserve: take the first candidate that has no more than `claims_seen` claims. Its place in line ends with that.

        `claim.instance` is ignored. None if every candidate has more claims than were seen (look again), or if there is none.
        None, too, if with a `passage` it would pass others in line.
        A repeated claim of a request that holds one answers its instance and changes nothing.
        """

    async def move_claim(self, request: RequestId, to: InstanceId) -> bool:
        """Count the claim on another instance from now on. False if the request holds none."""

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        """Prolong these claims; answers those that do not exist any more."""

    async def release(self, request: RequestId) -> bool:
        """Give a claim back. True the first time."""

    async def claims(self) -> Sequence[Claim]:
        """All live claims, ordered by request id."""

    async def record_switch(self, leg: Leg, gap_ms: float, ttl_s: float) -> None:
        """A relay switched its client to this leg; `gap_ms` lay between the last event before and the first after."""

    async def switch_gap_ms(self, leg: Leg) -> float | None:
        """What record_switch noted, if it did and it has not expired."""

    async def ping(self) -> None:
        """Raise StoreError unless the store answers."""

    async def close(self) -> None:
        """Give connections back."""
