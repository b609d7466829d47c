"""A LineStore in Redis.

Keys
    midstream:line:LINE         zset  request -> rank * 2^40 + number of its arrival
    midstream:line_tiers:LINE   hash  tier -> how many wait
    midstream:line_tickets      hash  request -> arrival in ms, a blank, [line, gateway, tier, rank, tokens, excluded, again]
    midstream:line_expiry       zset  request -> expiry, ms
    midstream:line_number       the last arrival's number
    midstream:line_bound        hash  line -> requests claimed out of it, ever
    midstream:line_ahead        hash  request -> line, of claims ahead of room
    midstream:line_shed:LINE    zset  request -> until when it is remembered, ms
Channel
    midstream:line_moved        a message whenever it is worth looking again
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from backend.registry.line import SHED_TTL_S, Bell, LineLimits, LineSight, Standing, Ticket
from backend.registry.redis_link import RedisLink, whole_ms
from migration.leg import InstanceId, RequestId

CHANNEL = "midstream:line_moved"

LINE = """
local TICKETS, LINE_EXPIRY, BOUND, AHEAD = 'midstream:line_tickets', 'midstream:line_expiry', 'midstream:line_bound', 'midstream:line_ahead'
local RANK = 1099511627776
local function line_key(line) return 'midstream:line:' .. line end
local function tiers_key(line) return 'midstream:line_tiers:' .. line end
local function shed_key(line) return 'midstream:line_shed:' .. line end
local function ring()
    if redis.call('ZCARD', LINE_EXPIRY) > 0 then redis.call('PUBLISH', 'midstream:line_moved', '') end
end
local function read_ticket(text) return cjson.decode(string.sub(text, string.find(text, ' ', 1, true) + 1)) end
local function drop_ticket(request)
    redis.call('ZREM', LINE_EXPIRY, request)
    local text = redis.call('HGET', TICKETS, request)
    if not text then return false end
    local ticket = read_ticket(text)
    redis.call('HDEL', TICKETS, request)
    redis.call('ZREM', line_key(ticket[1]), request)
    if redis.call('HINCRBY', tiers_key(ticket[1]), ticket[3], -1) <= 0 then redis.call('HDEL', tiers_key(ticket[1]), ticket[3]) end
    return ticket
end
local function may_pass(request, line, rank)
    if redis.call('ZSCORE', LINE_EXPIRY, request) then return true end
    local first = redis.call('ZRANGE', line_key(line), 0, 0, 'WITHSCORES')
    return not first[2] or tonumber(first[2]) >= (rank + 1) * RANK
end
local function bind(request, line, ahead)
    local ticket = drop_ticket(request)
    if ticket then redis.call('HINCRBY', BOUND, ticket[1], 1) end
    if ahead then redis.call('HSET', AHEAD, request, line) end
end
local late = redis.call('ZRANGEBYSCORE', LINE_EXPIRY, '-inf', ms(now))
for _, request in ipairs(late) do drop_ticket(request) end
if #late > 0 then ring() end
"""
"""Begins every script that touches lines or claims, after CLOCK; after it comes what sweeps claims."""

# ARGV: request, line, tier, rank, ticket, ttl ms, limit of the tier or '', limit of the line, shed ttl ms, then tiers to shed
_JOIN = """
local request, line, tier = ARGV[1], ARGV[2], ARGV[3]
local function make_room()
    for at = 10, #ARGV do
        if redis.call('HEXISTS', tiers_key(line), ARGV[at]) == 1 then
            for _, last in ipairs(redis.call('ZREVRANGE', line_key(line), 0, -1)) do
                if read_ticket(redis.call('HGET', TICKETS, last))[3] == ARGV[at] then
                    drop_ticket(last)
                    redis.call('ZADD', shed_key(line), ms(now + ARGV[9]), last)
                    redis.call('PEXPIRE', shed_key(line), ARGV[9])
                    ring()
                    return true
                end
            end
        end
    end
    return false
end
if not redis.call('ZSCORE', LINE_EXPIRY, request) then
    if ARGV[7] ~= '' and tonumber(redis.call('HGET', tiers_key(line), tier) or '0') >= tonumber(ARGV[7]) then return 0 end
    if redis.call('ZCARD', line_key(line)) >= tonumber(ARGV[8]) and not make_room() then return 0 end
    redis.call('ZREM', shed_key(line), request)
    redis.call('ZADD', line_key(line), ms(ARGV[4] * RANK + redis.call('INCR', 'midstream:line_number')), request)
    redis.call('HINCRBY', tiers_key(line), tier, 1)
    redis.call('HSET', TICKETS, request, ms(now) .. ' ' .. ARGV[5])
end
redis.call('ZADD', LINE_EXPIRY, ms(now + ARGV[6]), request)
return 1
"""

# ARGV: request
_LEAVE = """
local ticket = drop_ticket(ARGV[1])
if not ticket then return 0 end
ring()
return 1
"""

# ARGV: ttl ms, then requests; answers those that are not in line
_RENEW = """
local missing = {}
for at = 2, #ARGV do
    if redis.call('ZSCORE', LINE_EXPIRY, ARGV[at]) then
        redis.call('ZADD', LINE_EXPIRY, ms(now + ARGV[1]), ARGV[at])
    else
        missing[#missing + 1] = ARGV[at]
    end
end
return missing
"""

# ARGV: line, limit; answers bound, ahead, [shed], [tier, how many, ...], [request, ticket, waited ms, ...]
_LOOK = """
local line, ahead, found = ARGV[1], 0, {}
for _, name in ipairs(redis.call('HVALS', AHEAD)) do
    if name == line then ahead = ahead + 1 end
end
redis.call('ZREMRANGEBYSCORE', shed_key(line), '-inf', ms(now))
if tonumber(ARGV[2]) > 0 then
    for _, request in ipairs(redis.call('ZRANGE', line_key(line), 0, ARGV[2] - 1)) do
        local text = redis.call('HGET', TICKETS, request)
        local blank = string.find(text, ' ', 1, true)
        found[#found + 1] = request
        found[#found + 1] = string.sub(text, blank + 1)
        found[#found + 1] = ms(now - tonumber(string.sub(text, 1, blank - 1)))
    end
end
local bound = redis.call('HGET', BOUND, line) or '0'
return {bound, ms(ahead), redis.call('ZRANGE', shed_key(line), 0, -1), redis.call('HGETALL', tiers_key(line)), found}
"""

# ARGV: request
_STARTED = """
if redis.call('HDEL', AHEAD, ARGV[1]) == 0 then return 0 end
ring()
return 1
"""


class RedisLine:
    """See LineStore."""

    def __init__(self, link: RedisLink, preamble: str) -> None:
        self._link = link
        self._join = link.script(preamble + _JOIN)
        self._leave = link.script(preamble + _LEAVE)
        self._renew = link.script(preamble + _RENEW)
        self._look = link.script(preamble + _LOOK)
        self._started = link.script(preamble + _STARTED)

    async def join(self, ticket: Ticket, limits: LineLimits, ttl_s: float) -> bool:
        text = json.dumps([ticket.line, ticket.gateway, ticket.tier, ticket.rank, ticket.tokens, ticket.excluded, ticket.again])
        place = (ticket.request, ticket.line, ticket.tier, ticket.rank, text, whole_ms(ttl_s))
        bounds = ("" if limits.of_tier is None else limits.of_tier, limits.of_line, whole_ms(SHED_TTL_S))
        joined = await self._join(*place, *bounds, *limits.shed_first)
        return joined == 1

    async def leave(self, request: RequestId) -> bool:
        return await self._leave(request) == 1

    async def renew(self, requests: Sequence[RequestId], ttl_s: float) -> Sequence[RequestId]:
        if not requests:
            return []
        return [RequestId(request) for request in await self._renew.as_list(whole_ms(ttl_s), *requests)]

    async def look(self, line: str, limit: int) -> LineSight:
        bound, ahead, shed, tiers, found = await self._look.as_list(line, limit)
        return LineSight(
            standings=[
                Standing(_ticket(request, text), int(waited_ms) / 1000) for request, text, waited_ms in zip(*[iter(found)] * 3, strict=True)
            ],
            waiting={tier: int(count) for tier, count in zip(*[iter(tiers)] * 2, strict=True)},
            ahead=int(ahead),
            bound=int(bound),
            shed=frozenset(RequestId(request) for request in shed),
        )

    async def started(self, request: RequestId) -> bool:
        return await self._started(request) == 1

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[Bell]:
        async with self._link.subscription(CHANNEL) as bell:
            yield bell


def _ticket(request: str, text: str) -> Ticket:
    line, gateway, tier, rank, tokens, excluded, *newer = json.loads(text)  # a gateway of an older version says no more
    return Ticket(RequestId(request), line, gateway, tier, rank, tokens, tuple(InstanceId(each) for each in excluded), newer == [True])
