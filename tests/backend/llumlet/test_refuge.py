from dataclasses import replace
from typing import Any

import pytest

from backend.llumlet.refuge import Coming, choose_refuge, refuges
from backend.registry.instance import InstanceState
from backend.registry.store import Sighting
from migration.leg import InstanceId
from tests.backend.registry.reports import a_report

HERE = InstanceId("i1")


def seen(instance: str, age_s: float = 0.1, claims: int = 0, **fields: Any) -> Sighting:
    return Sighting(a_report(instance, url=f"http://{instance}", **fields), age_s, claims, 0)


def choose(*sightings: Sighting, tokens: int = 100, limit: int = 4, avoid: str | None = None, coming: Any = None) -> str | None:
    among = refuges(sightings, HERE, ("m",), max_age_s=5.0)
    best = choose_refuge(tokens, among, coming or {}, limit, InstanceId(avoid) if avoid else None)
    return best.destination.instance if best else None


def test_the_freest_instance_per_request_is_chosen() -> None:
    assert choose(seen("i2", free_tokens=800, running=4), seen("i3", free_tokens=500, running=1)) == "i3"
    assert choose(seen("i2", free_tokens=800, running=1, claims=9), seen("i3", free_tokens=500, running=2)) == "i3"


@pytest.mark.parametrize(
    "unfit",
    [
        seen("i1"),
        seen("i2", state=InstanceState.DRAINING),
        seen("i2", state=InstanceState.STARTING),
        seen("i2", models=("other",)),
        seen("i2", age_s=6.0),
        seen("i2", free_tokens=110),
        seen("i2", free_tokens=900, waiting_tokens=800),
    ],
)
def test_nobody_is_better_than_one_that_cannot_take_it(unfit: Sighting) -> None:
    assert choose(unfit) is None


def test_what_is_on_its_way_counts() -> None:
    two = seen("i2", free_tokens=900), seen("i3", free_tokens=600)
    assert choose(*two) == "i2"
    assert choose(*two, coming={InstanceId("i2"): Coming(2, 200)}) == "i3"
    assert choose(two[0], limit=2, coming={InstanceId("i2"): Coming(2, 200)}) is None
    assert choose(two[0], coming={InstanceId("i2"): Coming(1, 790)}) is None


def test_whoever_failed_it_is_asked_last() -> None:
    two = seen("i2", free_tokens=900), seen("i3", free_tokens=600)
    assert choose(*two, avoid="i2") == "i3"
    assert choose(two[0], avoid="i2") == "i2"
    full = replace(two[1], report=replace(two[1].report, free_tokens=10))
    assert choose(two[0], full, avoid="i2") == "i2"
