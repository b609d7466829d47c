import pytest

from gateway.policy.tier import BATCH, HIGH, NORMAL, Tier, Tiers


def test_defaults_are_ordered_by_urgency() -> None:
    assert HIGH.rank < NORMAL.rank < BATCH.rank
    assert HIGH.weight > NORMAL.weight > BATCH.weight
    assert not HIGH.sheddable


def test_an_unknown_tier_is_the_default_one() -> None:
    assert Tiers().find("high") is HIGH
    assert Tiers().find("gold") is NORMAL
    assert Tiers(default="batch").find("gold") is BATCH
    assert not Tiers().knows("gold")


@pytest.mark.parametrize(
    "make", [lambda: Tiers((HIGH, HIGH), "high"), lambda: Tiers((HIGH,)), lambda: Tier("", 0), lambda: Tier("x", 0, weight=0.0)]
)
def test_nonsense_is_refused(make: type[Tiers]) -> None:
    with pytest.raises(ValueError):
        make()
