"""A LeaseStore in Redis.

Keys
    midstream:lease:NAME   hash of holder and token, expires by itself
    midstream:lease_tokens hash name -> the last token granted
"""

from backend.registry.lease import Lease
from backend.registry.redis_link import CLOCK, RedisLink, whole_ms

# ARGV: name, holder, ttl ms. Answers the token, or false.
_ACQUIRE = (
    CLOCK
    + """
local key = 'midstream:lease:' .. ARGV[1]
local held = redis.call('HMGET', key, 'holder', 'token')
if held[1] and held[1] ~= ARGV[2] then return false end
local token = held[2]
if not token then
    local last = tonumber(redis.call('HGET', 'midstream:lease_tokens', ARGV[1]) or '0')
    token = ms(math.max(last + 1, now)) -- grows even if Redis has forgotten the last one
    redis.call('HSET', 'midstream:lease_tokens', ARGV[1], token)
end
redis.call('HSET', key, 'holder', ARGV[2], 'token', token)
redis.call('PEXPIRE', key, ARGV[3])
return tonumber(token)
"""
)

# ARGV: name, holder, token
_RELEASE = """
local key = 'midstream:lease:' .. ARGV[1]
local held = redis.call('HMGET', key, 'holder', 'token')
if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] then return 0 end
return redis.call('DEL', key)
"""


class RedisLeases:
    """See LeaseStore."""

    def __init__(self, link: RedisLink) -> None:
        self._acquire = link.script(_ACQUIRE)
        self._release = link.script(_RELEASE)

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        token = await self._acquire(name, holder, whole_ms(ttl_s))
        return Lease(name, holder, token) if isinstance(token, int) else None

    async def release(self, lease: Lease) -> bool:
        return await self._release(lease.name, lease.holder, lease.token) == 1
