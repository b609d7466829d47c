"""A RecordStore in Redis.

Keys
    midstream:record:KIND:NAME   hash of version and text, expires by itself
    midstream:records:KIND       zset name -> expiry, ms; each write takes out who has run out, and it goes with its last one
"""

from collections.abc import Mapping

from backend.registry.record import Record
from backend.registry.redis_link import CLOCK, RedisLink, whole_ms

# ARGV: kind, name, version, ttl ms, text
_WRITE = (
    CLOCK
    + """
local key = 'midstream:record:' .. ARGV[1] .. ':' .. ARGV[2]
local version = redis.call('HGET', key, 'version') or '0'
if version ~= ARGV[3] then
    local next = string.format('%.0f', ARGV[3] + 1)
    if version == next and redis.call('HGET', key, 'text') == ARGV[5] then return 1 end -- the same call, repeated
    return 0
end
redis.call('HSET', key, 'version', string.format('%.0f', ARGV[3] + 1), 'text', ARGV[5])
redis.call('PEXPIRE', key, ARGV[4])
local names = 'midstream:records:' .. ARGV[1]
redis.call('ZREMRANGEBYSCORE', names, '-inf', ms(now))
redis.call('ZADD', names, ms(now + ARGV[4]), ARGV[2])
redis.call('PEXPIREAT', names, redis.call('ZRANGE', names, -1, -1, 'WITHSCORES')[2])
return 1
"""
)

# ARGV: kind, name
_READ = """
local kept = redis.call('HMGET', 'midstream:record:' .. ARGV[1] .. ':' .. ARGV[2], 'version', 'text')
if not kept[1] then return {} end
return kept
"""

# ARGV: kind; answers name, version, text of each in one flat list
_READ_ALL = (
    CLOCK
    + """
local names = 'midstream:records:' .. ARGV[1]
redis.call('ZREMRANGEBYSCORE', names, '-inf', ms(now))
local found = {}
for _, name in ipairs(redis.call('ZRANGE', names, 0, -1)) do
    local kept = redis.call('HMGET', 'midstream:record:' .. ARGV[1] .. ':' .. name, 'version', 'text')
    if kept[1] then
        found[#found + 1] = name
        found[#found + 1] = kept[1]
        found[#found + 1] = kept[2]
    end
end
return found
"""
)

# ARGV: kind, name
_DELETE = """
redis.call('ZREM', 'midstream:records:' .. ARGV[1], ARGV[2])
return redis.call('DEL', 'midstream:record:' .. ARGV[1] .. ':' .. ARGV[2])
"""


class RedisRecords:
    """See RecordStore."""

    def __init__(self, link: RedisLink) -> None:
        self._write = link.script(_WRITE)
        self._read = link.script(_READ)
        self._read_all = link.script(_READ_ALL)
        self._delete = link.script(_DELETE)

    async def write(self, kind: str, name: str, text: str, *, version: int, ttl_s: float) -> bool:
        return await self._write(kind, name, version, whole_ms(ttl_s), text) == 1

    async def read(self, kind: str, name: str) -> Record | None:
        kept = await self._read.as_list(kind, name)
        return Record(int(kept[0]), kept[1]) if kept else None

    async def read_all(self, kind: str) -> Mapping[str, Record]:
        flat = await self._read_all.as_list(kind)
        return {name: Record(int(version), text) for name, version, text in sorted(zip(*[iter(flat)] * 3, strict=True))}

    async def delete(self, kind: str, name: str) -> bool:
        return await self._delete(kind, name) == 1
