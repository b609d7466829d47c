import pytest

from gateway.policy.tier import BATCH, HIGH, NORMAL, Tier, Tiers, override_tiers


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


def test_nothing_changed_is_the_built_in_tiers() -> None:
    assert override_tiers({}, "normal") == Tiers((HIGH, NORMAL, BATCH), "normal")


def test_fields_change_tiers_come_and_go() -> None:
    tiers = override_tiers({"high": {"weight": 20, "sheddable": True}, "batch": None, "gold": {"rank": 0, "patience_s": 2.5}}, "gold")
    assert [tier.name for tier in tiers.tiers] == ["high", "normal", "gold"]
    assert (tiers.find("high").weight, tiers.find("high").sheddable, tiers.find("high").rank) == (20, True, 0)
    assert tiers.find("gold") == Tier("gold", 0, patience_s=2.5)
    assert tiers.find("unheard of").name == "gold"


@pytest.mark.parametrize(
    ("changes", "default", "complaint"),
    [
        ({"high": {"wait": 1}}, "normal", "unknown key 'wait'"),
        ({"high": {"rank": "1"}}, "normal", "'rank' cannot be '1'"),
        ({"high": {"rank": True}}, "normal", "'rank' cannot be True"),
        ({"high": {"rank": -1}}, "normal", "rank 0 to 1000"),
        ({"high": {"weight": 0}}, "normal", "weight > 0"),
        ({"high": {"ttft_objective_s": 0}}, "normal", "objectives > 0"),
        ({"gold": {"weight": 3}}, "normal", "needs a 'rank'"),
        ({"Go ld": {"rank": 3}}, "normal", "no name of a tier"),
        ({"normal": None}, "normal", "the default 'normal'"),
        ({}, "gold", "the default 'gold'"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, dict[str, object] | None], default: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        override_tiers(changes, default)


def test_urgency_and_whom_to_shed() -> None:
    tiers = Tiers((BATCH, NORMAL, HIGH, Tier("spare", 5), Tier("sworn", 4, sheddable=False)), "normal")
    assert (tiers.most_urgent, tiers.least_urgent.name) == (HIGH, "spare")
    assert tiers.shed_for(HIGH) == ("spare", "batch", "normal")
    assert tiers.shed_for(NORMAL) == ("spare", "batch")
    assert tiers.shed_for(tiers.find("spare")) == ()
