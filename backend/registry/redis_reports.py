"""The instances' reports in Redis. A reader is sent only the reports that are new to it, and parses each once.

Keys
    midstream:reports         hash  instance -> the report's JSON
    midstream:report_marks    hash  instance -> [incarnation, sequence, published ms]
    midstream:report_expiry   zset  instance -> expiry, ms
"""

from collections.abc import Sequence

from backend.registry.instance import LoadReport
from backend.registry.redis_link import RedisLink, whole_ms
from backend.registry.store import Sighting, StoreError
from migration.leg import InstanceId

REPORTS = """
local REPORTS, MARKS, REPORT_EXPIRY = 'midstream:reports', 'midstream:report_marks', 'midstream:report_expiry'
local function drop_report(instance)
    redis.call('HDEL', REPORTS, instance)
    redis.call('HDEL', MARKS, instance)
    redis.call('ZREM', REPORT_EXPIRY, instance)
end
for _, instance in ipairs(redis.call('ZRANGEBYSCORE', REPORT_EXPIRY, '-inf', ms(now))) do drop_report(instance) end
"""
"""Begins every script that touches reports, after CLOCK."""

# ARGV: instance, incarnation, sequence, ttl ms, json, 1 if it is urgent
_PUBLISH = """
local mark = redis.call('HGET', MARKS, ARGV[1])
if mark then
    local known = cjson.decode(mark)
    if known[1] == ARGV[2] and tonumber(known[2]) > tonumber(ARGV[3]) then return 0 end
end
redis.call('HSET', REPORTS, ARGV[1], ARGV[5])
redis.call('HSET', MARKS, ARGV[1], cjson.encode({ARGV[2], ARGV[3], ms(now)}))
redis.call('ZADD', REPORT_EXPIRY, ms(now + ARGV[4]), ARGV[1])
if ARGV[6] == '1' or not mark then ring() end
return 1
"""

_WITHDRAW = """
drop_report(ARGV[1])
return 1
"""

# ARGV: when the reader last looked, in ms. Answers lines, in one text that costs the reader little to parse: the time in ms, then of each
# instance its name, its report or nothing if that is older than the last look, its age in ms, its claims and their tokens.
_SIGHTINGS = """
local function values_of(key)
    local flat, values = redis.call('HGETALL', key), {}
    for at = 1, #flat, 2 do values[flat[at]] = flat[at + 1] end
    return values
end
local marks, count, tokens = redis.call('HGETALL', MARKS), values_of(COUNT), values_of(TOKENS)
local seen, since = {ms(now)}, tonumber(ARGV[1])
for at = 1, #marks, 2 do
    local instance = marks[at]
    local published = tonumber(string.match(marks[at + 1], '"(%d+)"%]$'))
    local report = ''
    if published >= since then report = string.gsub(redis.call('HGET', REPORTS, instance), '\\n', ' ') end
    local last = #seen
    seen[last + 1] = cjson.encode(instance)
    seen[last + 2] = report
    seen[last + 3] = ms(now - published)
    seen[last + 4] = count[instance] or '0'
    seen[last + 5] = tokens[instance] or '0'
end
return table.concat(seen, '\\n')
"""


class RedisReports:
    """See InstanceStore. `preamble` begins the scripts: CLOCK, whatever may be rung, REPORTS, and the claims' counts."""

    def __init__(self, link: RedisLink, preamble: str) -> None:
        self._publish = link.script(preamble + _PUBLISH)
        self._withdraw = link.script(preamble + _WITHDRAW)
        self._sightings = link.script(preamble + _SIGHTINGS)
        self._looked_ms = "0"
        self._known: dict[str, LoadReport | None] = {}

    async def publish(self, report: LoadReport, ttl_s: float, *, urgent: bool = False) -> None:
        await self._publish(report.instance, report.incarnation, report.sequence, whole_ms(ttl_s), report.to_json(), int(urgent))

    async def withdraw(self, instance: InstanceId) -> None:
        await self._withdraw(instance)

    async def sightings(self) -> Sequence[Sighting]:
        """In the order of instances' ids. A report from before the last look is one that is known, or else all are asked for again."""
        seen = self._read(await self._sightings(self._looked_ms))
        if seen is None:
            seen = self._read(await self._sightings(0))
        if seen is None:
            raise StoreError("redis: a report that was asked for is missing")
        return sorted(seen, key=lambda sighting: sighting.report.instance)

    def _read(self, answer: object) -> list[Sighting] | None:
        """What was answered; None if a report is neither there nor known. Raises StoreError."""
        if not isinstance(answer, str):
            raise StoreError(f"expected a text from redis, got {type(answer).__name__}")
        looked_ms, *rows = answer.split("\n")
        known: dict[str, LoadReport | None] = {}
        seen = []
        for name, text, age_ms, claims, tokens in zip(*[iter(rows)] * 5, strict=True):
            if text:
                report = _readable(text)
            elif name in self._known:
                report = self._known[name]
            else:
                return None
            known[name] = report
            if report is not None:
                seen.append(Sighting(report, int(age_ms) / 1000, int(claims), int(tokens)))
        self._known, self._looked_ms = known, looked_ms
        return seen


def _readable(text: str) -> LoadReport | None:
    """One instance that speaks another version must not hide all others."""
    try:
        return LoadReport.from_json(text)
    except ValueError:
        return None
