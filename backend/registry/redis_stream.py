"""A StreamStore in Redis.

Keys, both expire by themselves
    midstream:stream:NAME         hash of owner, term, request and created
    midstream:stream_tokens:NAME  list of token ids
"""

from collections.abc import Sequence

from backend.registry.redis_link import RedisLink, whole_ms
from backend.registry.stream import Appended, KeptStream

_KEYS = """
local stream, tokens = 'midstream:stream:' .. ARGV[1], 'midstream:stream_tokens:' .. ARGV[1]
local owner = redis.call('HGET', stream, 'owner')
local function keep(ttl)
    redis.call('PEXPIRE', stream, ttl)
    redis.call('PEXPIRE', tokens, ttl)
end
"""

# ARGV: name, owner, term, request, created or '', ttl ms
_BEGIN = """
if owner and owner ~= ARGV[2] then return 0 end
redis.call('DEL', tokens)
redis.call('HSET', stream, 'owner', ARGV[2], 'term', ARGV[3], 'request', ARGV[4], 'created', ARGV[5])
keep(ARGV[6])
return 1
"""

# ARGV: name, owner, at, created or '', ttl ms, then the tokens
_APPEND = """
if not owner then return 'gone' end
if owner ~= ARGV[2] then return 'taken' end
local held, at = redis.call('LLEN', tokens), tonumber(ARGV[3])
if held < at then return 'gone' end
if at == 0 then redis.call('DEL', tokens) elseif held > at then redis.call('LTRIM', tokens, 0, at - 1) end
for first = 6, #ARGV, 1000 do redis.call('RPUSH', tokens, unpack(ARGV, first, math.min(first + 999, #ARGV))) end
if ARGV[4] ~= '' then redis.call('HSET', stream, 'created', ARGV[4]) end
keep(ARGV[5])
return 'kept'
"""

# ARGV: name; answers owner, term, request, created, then the tokens
_READ = """
if not owner then return {} end
local found = redis.call('HMGET', stream, 'owner', 'term', 'request', 'created')
for _, token in ipairs(redis.call('LRANGE', tokens, 0, -1)) do found[#found + 1] = token end
return found
"""

# ARGV: name, owner, the next owner, ttl ms; answers the term, or 0
_TAKE = """
if not owner or (owner ~= ARGV[2] and owner ~= ARGV[3]) then return 0 end
if owner ~= ARGV[3] then
    redis.call('HSET', stream, 'owner', ARGV[3])
    redis.call('HINCRBY', stream, 'term', 1)
end
keep(ARGV[4])
return tonumber(redis.call('HGET', stream, 'term'))
"""


class RedisStreams:
    """See StreamStore."""

    def __init__(self, link: RedisLink) -> None:
        self._begin = link.script(_KEYS + _BEGIN)
        self._append = link.script(_KEYS + _APPEND)
        self._read = link.script(_KEYS + _READ)
        self._take = link.script(_KEYS + _TAKE)

    async def begin(self, name: str, stream: KeptStream, ttl_s: float) -> bool:
        created = "" if stream.created is None else stream.created
        return await self._begin(name, stream.owner, stream.term, stream.request, created, whole_ms(ttl_s)) == 1

    async def append(self, name: str, owner: str, at: int, tokens: Sequence[int], created: int | None, ttl_s: float) -> Appended:
        known = "" if created is None else created
        return Appended(await self._append(name, owner, at, known, whole_ms(ttl_s), *tokens))

    async def read(self, name: str) -> KeptStream | None:
        found = await self._read.as_list(name)
        if not found:
            return None
        owner, term, request, created, *tokens = found
        return KeptStream(owner, int(term), request, int(created) if created else None, tuple(map(int, tokens)))

    async def take(self, name: str, owner: str, to: str, ttl_s: float) -> int | None:
        term = await self._take(name, owner, to, whole_ms(ttl_s))
        return term if isinstance(term, int) and term > 0 else None
