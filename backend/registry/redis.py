"""An InstanceStore in Redis: every operation is one script. (The reports are in redis_reports.py.)

Keys
    midstream:claims          hash  request -> [instance, gateway, tier, tokens]
    midstream:claim_expiry    zset  request -> expiry, ms
    midstream:claim_count     hash  instance -> live claims
    midstream:claim_tokens    hash  instance -> sum of their tokens
    midstream:switch:R:EPOCH  string, expires by itself: gap in ms

What has expired is swept out at the start of each script, so counts and claims are never apart.
"""

import json
from collections.abc import Sequence

from backend.registry.instance import LoadReport
from backend.registry.line import Passage
from backend.registry.redis_lease import RedisLeases
from backend.registry.redis_line import LINE, RedisLine
from backend.registry.redis_link import CLOCK, RedisLink, whole_ms
from backend.registry.redis_news import RedisNews
from backend.registry.redis_rates import RedisRates
from backend.registry.redis_record import RedisRecords
from backend.registry.redis_reports import REPORTS, RedisReports
from backend.registry.redis_stream import RedisStreams
from backend.registry.store import Candidate, Claim, Sighting
from migration.leg import InstanceId, Leg, RequestId

_PREAMBLE = (
    CLOCK
    + LINE
    + REPORTS
    + """
local CLAIMS, CLAIM_EXPIRY = 'midstream:claims', 'midstream:claim_expiry'
local COUNT, TOKENS = 'midstream:claim_count', 'midstream:claim_tokens'

local function minus(tokens) return tokens == '0' and tokens or '-' .. tokens end -- Redis takes '-0' for no number

local function count_claim(instance, claims, tokens)
    if redis.call('HINCRBY', COUNT, instance, claims) == 0 then
        redis.call('HDEL', COUNT, instance)
        redis.call('HDEL', TOKENS, instance)
    else
        redis.call('HINCRBY', TOKENS, instance, tokens)
    end
end
local function drop_claim(request)
    local text = redis.call('HGET', CLAIMS, request)
    redis.call('ZREM', CLAIM_EXPIRY, request)
    if not text then return 0 end
    local claim = cjson.decode(text)
    redis.call('HDEL', CLAIMS, request)
    redis.call('HDEL', AHEAD, request)
    count_claim(claim[1], -1, minus(claim[4]))
    ring()
    return 1
end
for _, request in ipairs(redis.call('ZRANGEBYSCORE', CLAIM_EXPIRY, '-inf', ms(now))) do drop_claim(request) end
"""
)

# ARGV: request, gateway, tier, tokens, ttl ms, '=' and the line or '', rank, 1 if ahead of room,
# then instance and claims seen of each candidate
_CLAIM = """
local held = redis.call('HGET', CLAIMS, ARGV[1])
if held then return cjson.decode(held)[1] end
local line = string.sub(ARGV[6], 2)
if ARGV[6] ~= '' and not may_pass(ARGV[1], line, ARGV[7]) then return false end
for at = 9, #ARGV, 2 do
    local instance = ARGV[at]
    if tonumber(redis.call('HGET', COUNT, instance) or '0') <= tonumber(ARGV[at + 1]) then
        redis.call('HSET', CLAIMS, ARGV[1], cjson.encode({instance, ARGV[2], ARGV[3], ARGV[4]}))
        redis.call('ZADD', CLAIM_EXPIRY, ms(now + ARGV[5]), ARGV[1])
        count_claim(instance, 1, ARGV[4])
        bind(ARGV[1], line, ARGV[8] == '1')
        return instance
    end
end
return false
"""

# ARGV: request, instance
_MOVE_CLAIM = """
local text = redis.call('HGET', CLAIMS, ARGV[1])
if not text then return 0 end
local claim = cjson.decode(text)
count_claim(claim[1], -1, minus(claim[4]))
count_claim(ARGV[2], 1, claim[4])
claim[1] = ARGV[2]
redis.call('HSET', CLAIMS, ARGV[1], cjson.encode(claim))
redis.call('HDEL', AHEAD, ARGV[1])
ring()
return 1
"""

# ARGV: ttl ms, then requests; answers those that hold no claim
_RENEW = """
local missing = {}
for at = 2, #ARGV do
    if redis.call('HEXISTS', CLAIMS, ARGV[at]) == 1 then
        redis.call('ZADD', CLAIM_EXPIRY, ms(now + ARGV[1]), ARGV[at])
    else
        missing[#missing + 1] = ARGV[at]
    end
end
return missing
"""

_RELEASE = """
return drop_claim(ARGV[1])
"""

_CLAIMS = """
return redis.call('HGETALL', CLAIMS)
"""


class RedisStore:
    """Keeps the store's guarantees with Lua scripts over one RedisLink."""

    def __init__(self, url: str, *, timeout_s: float = 1.0, max_connections: int = 16) -> None:
        link = self._link = RedisLink(url, timeout_s=timeout_s, max_connections=max_connections)
        self.leases = RedisLeases(link)
        self.records = RedisRecords(link)
        self.streams = RedisStreams(link)
        self.news = RedisNews(link)
        self.rates = RedisRates(link)
        self.line = RedisLine(link, _PREAMBLE)
        self._reports = RedisReports(link, _PREAMBLE)
        self._claim = link.script(_PREAMBLE + _CLAIM)
        self._move_claim = link.script(_PREAMBLE + _MOVE_CLAIM)
        self._renew = link.script(_PREAMBLE + _RENEW)
        self._release = link.script(_PREAMBLE + _RELEASE)
        self._claims = link.script(_PREAMBLE + _CLAIMS)

    async def publish(self, report: LoadReport, ttl_s: float, *, urgent: bool = False) -> None:
        await self._reports.publish(report, ttl_s, urgent=urgent)

    async def withdraw(self, instance: InstanceId) -> None:
        await self._reports.withdraw(instance)

    async def sightings(self) -> Sequence[Sighting]:
        return await self._reports.sightings()

    async def claim(self, claim: Claim, candidates: Sequence[Candidate], ttl_s: float, passage: Passage | None = None) -> InstanceId | None:
        way: tuple[str, int, int] = ("", 0, 0) if passage is None else (f"={passage.line}", passage.rank, int(passage.ahead))
        wanted = [part for candidate in candidates for part in (candidate.instance, candidate.claims_seen)]
        chosen = await self._claim(claim.request, claim.gateway, claim.tier, claim.tokens, whole_ms(ttl_s), *way, *wanted)
        return None if chosen is None else InstanceId(str(chosen))

    async def move_claim(self, request: RequestId, to: InstanceId) -> bool:
        return await self._move_claim(request, to) == 1

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        if not requests:
            return []
        return [RequestId(request) for request in await self._renew.as_list(whole_ms(ttl_s), *requests)]

    async def release(self, request: RequestId) -> bool:
        return await self._release(request) == 1

    async def claims(self) -> Sequence[Claim]:
        flat = await self._claims.as_list()
        return sorted((_claim(request, text) for request, text in zip(*[iter(flat)] * 2, strict=True)), key=lambda claim: claim.request)

    async def record_switch(self, leg: Leg, gap_ms: float, ttl_s: float) -> None:
        await self._link.put(_switch_key(leg), repr(gap_ms), ttl_s)

    async def switch_gap_ms(self, leg: Leg) -> float | None:
        noted = await self._link.get(_switch_key(leg))
        return None if noted is None else float(noted)

    async def ping(self) -> None:
        await self._link.get("midstream:ping")

    async def close(self) -> None:
        await self._link.close()


def _switch_key(leg: Leg) -> str:
    return f"midstream:switch:{leg.request}:{leg.epoch}"


def _claim(request: str, text: str) -> Claim:
    instance, gateway, tier, tokens = json.loads(text)
    return Claim(RequestId(request), InstanceId(instance), gateway, tier, int(tokens))
