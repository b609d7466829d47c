"""What a reader of reports is sent, and what it parses."""

from dataclasses import replace

import pytest
from redis import Redis

from backend.registry.instance import LoadReport
from backend.registry.redis import RedisStore
from migration.leg import InstanceId


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were parsed."""
    texts: list[str] = []
    whole = LoadReport.from_json

    def from_json(text: str | bytes) -> LoadReport:
        texts.append(str(text))
        return whole(text)

    monkeypatch.setattr(LoadReport, "from_json", staticmethod(from_json))
    return texts


async def looked_again(store: RedisStore, redis_url: str) -> None:
    """Until the last publication lies before the last look, by Redis's clock in ms."""
    await store.sightings()
    with Redis.from_url(redis_url) as client:
        seconds, micros = client.time()
        while client.time()[0] * 1000 + client.time()[1] // 1000 <= seconds * 1000 + micros // 1000:
            pass
    await store.sightings()


async def test_only_a_report_that_is_new_is_parsed(redis_store: RedisStore, redis_url: str, report: LoadReport, parsed: list[str]) -> None:
    other = replace(report, instance=InstanceId("i2"))
    await redis_store.publish(report, 60)
    await redis_store.publish(other, 60)
    await looked_again(redis_store, redis_url)
    parsed.clear()
    assert [sighting.report for sighting in await redis_store.sightings()] == [report, other]
    assert parsed == []
    newer = replace(other, sequence=2, running=7)
    await redis_store.publish(newer, 60)
    assert [sighting.report for sighting in await redis_store.sightings()] == [report, newer]
    assert parsed == [newer.to_json()]


async def test_a_reader_that_forgot_is_told_again(redis_store: RedisStore, redis_url: str, report: LoadReport) -> None:
    await redis_store.publish(report, 60)
    await looked_again(redis_store, redis_url)
    redis_store._reports._known = {}
    assert [sighting.report for sighting in await redis_store.sightings()] == [report]


async def test_an_instance_that_left_and_came_back_is_seen_anew(redis_store: RedisStore, redis_url: str, report: LoadReport) -> None:
    await redis_store.publish(report, 60)
    await looked_again(redis_store, redis_url)
    await redis_store.withdraw(report.instance)
    assert await redis_store.sightings() == []
    back = replace(report, incarnation="b")
    await redis_store.publish(back, 60)
    assert [sighting.report for sighting in await redis_store.sightings()] == [back]


@pytest.mark.parametrize("name", ["a\nb", '"', "ü", "a b"])
async def test_names_and_foreign_reports_come_as_they_are(redis_store: RedisStore, redis_url: str, report: LoadReport, name: str) -> None:
    odd = replace(report, instance=InstanceId(name))
    await redis_store.publish(odd, 60)
    await redis_store.publish(replace(report, instance=InstanceId("zz")), 60)
    with Redis.from_url(redis_url) as client:
        client.hset("midstream:reports", "zz", '{\n"version": 99\n}')
    assert [sighting.report for sighting in await redis_store.sightings()] == [odd]
