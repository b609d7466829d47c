"""One suite for both stores: what backend/registry/store.py guarantees."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from backend.registry.instance import LoadReport
from backend.registry.store import Candidate, Claim, InstanceStore
from migration.leg import InstanceId, Leg, RequestId

I1, I2 = InstanceId("i1"), InstanceId("i2")
R1, R2, R3 = RequestId("r.1"), RequestId("r2"), RequestId("r3")


def claim(request: RequestId, tokens: int = 10) -> Claim:
    return Claim(request, InstanceId(""), "g1", "normal", tokens)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.005)


async def test_published_report_is_seen_with_its_age(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    await store.publish(replace(report, instance=InstanceId("i0")), 60)
    seen = await store.sightings()
    assert [sighting.report.instance for sighting in seen] == ["i0", "i1"]
    assert seen[1].report == report
    assert (seen[1].claims, seen[1].claimed_tokens) == (0, 0)
    assert 0 <= seen[1].age_s < 10


async def test_report_expires(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 0.03)

    async def gone() -> bool:
        return not await store.sightings()

    await until(gone)
    await store.publish(replace(report, sequence=0), 60)
    assert (await store.sightings())[0].report.sequence == 0


async def test_report_never_goes_backwards_within_an_incarnation(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(replace(report, sequence=10), 60)
    await store.publish(replace(report, sequence=9, running=7), 60)
    assert (await store.sightings())[0].report.sequence == 10
    await store.publish(replace(report, sequence=10, running=3), 60)
    assert (await store.sightings())[0].report.running == 3
    await store.publish(replace(report, sequence=1, incarnation="b"), 60)
    assert (await store.sightings())[0].report.incarnation == "b"


async def test_withdrawn_report_is_gone_but_claims_stay(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    await store.claim(claim(R1), [Candidate(I1, 0)], 60)
    await store.withdraw(I1)
    await store.withdraw(I1)
    assert not await store.sightings()
    assert len(await store.claims()) == 1


async def test_claim_takes_the_first_candidate_that_nobody_has_come_to_since_it_was_seen(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    assert await store.claim(claim(R1, 7), [Candidate(I1, 0)], 60) == I1
    assert await store.claim(claim(R2, 5), [Candidate(I1, 0), Candidate(I2, 0)], 60) == I2
    assert await store.claim(claim(RequestId("r3")), [Candidate(I1, 0), Candidate(I2, 0)], 60) is None
    assert await store.claim(claim(RequestId("r3")), [], 60) is None
    sighting = (await store.sightings())[0]
    assert (sighting.claims, sighting.claimed_tokens) == (1, 7)
    assert list(await store.claims()) == [Claim(R1, I1, "g1", "normal", 7), Claim(R2, I2, "g1", "normal", 5)]


async def test_fewer_claims_than_were_seen_are_no_conflict(store: InstanceStore) -> None:
    assert await store.claim(claim(R1), [Candidate(I1, 3)], 60) == I1
    assert await store.claim(claim(R2), [Candidate(I1, 1), Candidate(I2, 0)], 60) == I1
    assert await store.release(R1)
    assert await store.claim(claim(RequestId("r3")), [Candidate(I1, 1), Candidate(I2, 0)], 60) == I1


async def test_repeated_claim_changes_nothing(store: InstanceStore) -> None:
    assert await store.claim(claim(R1), [Candidate(I1, 0)], 60) == I1
    assert await store.claim(claim(R1), [Candidate(I2, 0)], 60) == I1
    assert len(await store.claims()) == 1


async def test_burst_is_spread_one_by_one(store: InstanceStore) -> None:
    """vllm-project/router#177: many requests between two looks must not all go to one instance."""
    chosen = await asyncio.gather(*(store.claim(claim(RequestId(f"r{n}")), [Candidate(I1, 0), Candidate(I2, 0)], 60) for n in range(20)))
    assert sorted(str(instance) for instance in chosen) == ["None"] * 18 + ["i1", "i2"]


async def test_moved_claim_counts_elsewhere(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    await store.publish(replace(report, instance=I2), 60)
    await store.claim(claim(R1, 9), [Candidate(I1, 0)], 60)
    assert await store.move_claim(R1, I2)
    assert not await store.move_claim(R2, I2)
    assert [(sighting.claims, sighting.claimed_tokens) for sighting in await store.sightings()] == [(0, 0), (1, 9)]
    assert await store.move_claim(R1, I2)
    assert [(sighting.claims, sighting.claimed_tokens) for sighting in await store.sightings()] == [(0, 0), (1, 9)]


async def test_release_counts_once(store: InstanceStore, report: LoadReport) -> None:
    """vllm-project/aibrix#2463: released several times, the count went negative."""
    await store.publish(report, 60)
    await store.claim(claim(R1), [Candidate(I1, 0)], 60)
    assert await store.release(R1)
    assert not await store.release(R1)
    assert not await store.release(R2)
    sighting = (await store.sightings())[0]
    assert (sighting.claims, sighting.claimed_tokens) == (0, 0)


async def test_claims_of_no_tokens_move_and_end_like_others(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    await store.publish(replace(report, instance=I2), 60)
    await store.claim(claim(R1, tokens=0), [Candidate(I1, 0)], 60)
    await store.claim(claim(R2, tokens=7), [Candidate(I1, 1)], 60)
    assert await store.move_claim(R1, I2)
    await store.claim(claim(R3, tokens=0), [Candidate(I2, 1)], 60)
    assert await store.release(R1)
    assert [(seen.claims, seen.claimed_tokens) for seen in await store.sightings()] == [(1, 7), (1, 0)]


async def test_claim_expires_unless_renewed(store: InstanceStore, report: LoadReport) -> None:
    await store.publish(report, 60)
    await store.claim(claim(R1), [Candidate(I1, 0)], 30)
    await store.claim(claim(R2), [Candidate(I1, 1)], 60)
    assert list(await store.renew([R1, RequestId("never")], 60)) == ["never"]
    await store.renew([R2], 0.03)

    async def one_left() -> bool:
        return len(await store.claims()) == 1

    await until(one_left)
    assert (await store.claims())[0].request == R1
    assert (await store.sightings())[0].claims == 1
    assert list(await store.renew([R2], 60)) == [R2]
    assert list(await store.renew([], 60)) == []


async def test_switch_gap_is_kept_for_its_leg(store: InstanceStore) -> None:
    await store.record_switch(Leg(R1, 1), 12.5, 60)
    await store.record_switch(Leg(R1, 2), 0.1, 0.03)
    assert await store.switch_gap_ms(Leg(R1, 1)) == 12.5
    assert await store.switch_gap_ms(Leg(R1, 3)) is None

    async def expired() -> bool:
        return await store.switch_gap_ms(Leg(R1, 2)) is None

    await until(expired)


@pytest.mark.parametrize("name", ["a b", 'quo"te', "ü/☃", "x" * 300, "back\\slash"])
async def test_names_come_back_as_they_went_in(store: InstanceStore, name: str) -> None:
    held = Claim(RequestId(name), InstanceId(name), name, name, 1)
    assert await store.claim(held, [Candidate(InstanceId(name), 0)], 60) == name
    assert list(await store.claims()) == [held]
    assert await store.move_claim(RequestId(name), I1)
    assert await store.release(RequestId(name))


async def test_ping(store: InstanceStore) -> None:
    await store.ping()
