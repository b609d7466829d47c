"""A RateStore in Redis: one script.

Keys, all of which expire by themselves
    midstream:rate:BUCKET     hash of level and at (ms), until the bucket is full again
    midstream:rate_told:ID    what a call was answered, so that a repeated one takes nothing twice
"""

import secrets
from collections.abc import Sequence

from backend.registry.rates import SLACK, Charge
from backend.registry.redis_link import CLOCK, RedisLink

# ARGV: id of the call, 1 to take whatever there is, then bucket, rate a second, burst, amount of each. Answers the seconds to wait.
_USE = (
    CLOCK
    + f"""
local SLACK, TOLD_MS = {SLACK}, 10000
"""
    + """
local told = redis.call('GET', 'midstream:rate_told:' .. ARGV[1])
if told then return told end
local wait, levels = 0, {}
for at = 3, #ARGV, 4 do
    local per_s, burst, amount = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local kept = redis.call('HMGET', 'midstream:rate:' .. ARGV[at], 'level', 'at')
    local level = burst
    if kept[1] then level = math.min(burst, tonumber(kept[1]) + math.max(0, now - tonumber(kept[2])) * per_s / 1000) end
    levels[at] = level
    local missing = math.min(amount, burst) - level
    if missing > SLACK then wait = math.max(wait, missing / per_s) end
end
local answer = '0'
if wait > 0 and ARGV[2] ~= '1' then
    answer = string.format('%.6f', wait)
else
    for at = 3, #ARGV, 4 do
        local per_s, burst, key = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), 'midstream:rate:' .. ARGV[at]
        local level = math.min(burst, levels[at] - tonumber(ARGV[at + 3]))
        redis.call('HSET', key, 'level', string.format('%.17g', level), 'at', ms(now))
        redis.call('PEXPIRE', key, ms(math.ceil((burst - level) / per_s * 1000) + 1))
    end
end
redis.call('SET', 'midstream:rate_told:' .. ARGV[1], answer, 'PX', TOLD_MS)
return answer
"""
)


class RedisRates:
    """See RateStore."""

    def __init__(self, link: RedisLink) -> None:
        self._use = link.script(_USE)

    async def take(self, charges: Sequence[Charge]) -> float:
        return float(str(await self._use(secrets.token_hex(8), 0, *_flat(charges))))

    async def correct(self, charges: Sequence[Charge]) -> None:
        await self._use(secrets.token_hex(8), 1, *_flat(charges))


def _flat(charges: Sequence[Charge]) -> list[str]:
    return [part for one in charges for part in (one.bucket, repr(one.rate.per_s), repr(one.rate.burst), repr(one.amount))]
