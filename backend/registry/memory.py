"""An InstanceStore in one process: for tests, the simulator, and a gateway and a backend that live together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from backend.registry.instance import LoadReport
from backend.registry.lease import MemoryLeases
from backend.registry.line import MemoryLine, Passage
from backend.registry.news import MemoryNews
from backend.registry.rates import MemoryRates
from backend.registry.record import MemoryRecords
from backend.registry.store import Candidate, Claim, Sighting
from backend.registry.stream import MemoryStreams
from migration.leg import InstanceId, Leg, RequestId


@dataclass(frozen=True, slots=True)
class _Published:
    report: LoadReport
    published_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Held:
    claim: Claim
    expires_s: float


class MemoryStore:
    """Keeps the store's guarantees with plain dictionaries; `clock` gives seconds that never go back. Never raises StoreError."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.leases = MemoryLeases(clock)
        self.records = MemoryRecords(clock)
        self.streams = MemoryStreams(clock)
        self.news = MemoryNews()
        self.rates = MemoryRates(clock)
        self.line = MemoryLine(clock, self._expire)
        self._reports: dict[InstanceId, _Published] = {}
        self._claims: dict[RequestId, _Held] = {}
        self._counts: dict[InstanceId, tuple[int, int]] = {}
        """Claims on an instance, and their tokens."""
        self._switches: dict[Leg, tuple[float, float]] = {}
        self._due_s = inf
        """Before then nothing expires."""

    async def publish(self, report: LoadReport, ttl_s: float, *, urgent: bool = False) -> None:
        now_s = self._expire()
        known = self._reports.get(report.instance)
        if known and known.report.incarnation == report.incarnation and known.report.sequence > report.sequence:
            return
        self._reports[report.instance] = _Published(report, now_s, self._expiry_s(now_s, ttl_s))
        if urgent or known is None:
            self.line.ring()

    async def withdraw(self, instance: InstanceId) -> None:
        self._reports.pop(instance, None)

    async def sightings(self) -> Sequence[Sighting]:
        now_s = self._expire()
        return [
            Sighting(known.report, now_s - known.published_s, *self._counts.get(instance, (0, 0)))
            for instance, known in sorted(self._reports.items())
        ]

    async def claim(self, claim: Claim, candidates: Sequence[Candidate], ttl_s: float, passage: Passage | None = None) -> InstanceId | None:
        now_s = self._expire()
        held = self._claims.get(claim.request)
        if held:
            return held.claim.instance
        if passage is not None and not self.line.may_pass(claim.request, passage):
            return None
        for candidate in candidates:
            if self._counts.get(candidate.instance, (0, 0))[0] <= candidate.claims_seen:
                self._claims[claim.request] = _Held(replace(claim, instance=candidate.instance), self._expiry_s(now_s, ttl_s))
                self._count(candidate.instance, 1, claim.tokens)
                self.line.bind(claim.request, passage)
                return candidate.instance
        return None

    async def move_claim(self, request: RequestId, to: InstanceId) -> bool:
        self._expire()
        held = self._claims.get(request)
        if held is None:
            return False
        self._claims[request] = replace(held, claim=replace(held.claim, instance=to))
        self._count(held.claim.instance, -1, -held.claim.tokens)
        self._count(to, 1, held.claim.tokens)
        self.line.forget(request)
        self.line.ring()
        return True

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        now_s = self._expire()
        missing = []
        for request in requests:
            held = self._claims.get(request)
            if held is None:
                missing.append(request)
            else:
                self._claims[request] = replace(held, expires_s=self._expiry_s(now_s, ttl_s))
        return missing

    async def release(self, request: RequestId) -> bool:
        self._expire()
        return self._drop_claim(request)

    async def claims(self) -> Sequence[Claim]:
        self._expire()
        return [held.claim for _, held in sorted(self._claims.items())]

    async def record_switch(self, leg: Leg, gap_ms: float, ttl_s: float) -> None:
        self._switches[leg] = (gap_ms, self._expiry_s(self._expire(), ttl_s))

    async def switch_gap_ms(self, leg: Leg) -> float | None:
        self._expire()
        noted = self._switches.get(leg)
        return noted[0] if noted else None

    async def ping(self) -> None:
        """A dictionary always answers."""

    async def close(self) -> None:
        """Nothing to give back."""

    def _drop_claim(self, request: RequestId) -> bool:
        held = self._claims.pop(request, None)
        if held is None:
            return False
        self._count(held.claim.instance, -1, -held.claim.tokens)
        self.line.forget(request)
        self.line.ring()
        return True

    def _count(self, instance: InstanceId, claims: int, tokens: int) -> None:
        known_claims, known_tokens = self._counts.get(instance, (0, 0))
        if known_claims + claims:
            self._counts[instance] = known_claims + claims, known_tokens + tokens
        else:
            del self._counts[instance]

    def _expiry_s(self, now_s: float, ttl_s: float) -> float:
        expires_s = now_s + ttl_s
        self._due_s = min(self._due_s, expires_s)
        return expires_s

    def _expire(self) -> float:
        now_s = self.line.expire()
        if now_s < self._due_s:
            return now_s
        for instance in [i for i, known in self._reports.items() if known.expires_s <= now_s]:
            del self._reports[instance]
        for request in [r for r, held in self._claims.items() if held.expires_s <= now_s]:
            self._drop_claim(request)
        for leg in [leg for leg, (_, expires_s) in self._switches.items() if expires_s <= now_s]:
            del self._switches[leg]
        due_s = [known.expires_s for known in self._reports.values()] + [held.expires_s for held in self._claims.values()]
        self._due_s = min(due_s + [expires_s for _, expires_s in self._switches.values()], default=inf)
        return now_s
