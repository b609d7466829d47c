import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.policy.config import LlumnixPolicy, MidstreamPolicy, Policy, PolicyConfig
from gateway.policy.dispatch import Freest, LeastLoaded, LeastMemory, RoundRobin
from gateway.policy.line import Immediate, LateBinding
from gateway.policy.tier import Tiers

ADAPTER: TypeAdapter[PolicyConfig] = TypeAdapter(PolicyConfig)


def build(**values: object) -> Policy:
    return ADAPTER.validate_python(values).build(Tiers())


@pytest.mark.parametrize(
    ("name", "dispatch"),
    [("round_robin", RoundRobin), ("least_outstanding", LeastLoaded), ("infaas", LeastMemory), ("llumnix", Freest)],
)
def test_each_name_is_its_dispatch(name: str, dispatch: type) -> None:
    policy = build(name=name)
    assert isinstance(policy.line, Immediate)
    assert isinstance(policy.line.dispatch, dispatch)
    assert policy.dispatch == policy.line.dispatch
    assert (policy.rebalancing.pairing is not None) == (name == "llumnix")
    assert policy.rebalancing.price is None


def test_midstream_is_all_of_it() -> None:
    policy = build(name="midstream", weights={"high": 20.0}, stand_back_s=7)
    assert isinstance(policy.line, LateBinding)
    assert policy.line.stand_back_s == 7
    assert policy.line.tiers.find("high").weight == 20.0
    assert policy.line.tiers.find("normal").weight == 1.0
    assert policy.rebalancing.pairing is not None
    assert policy.rebalancing.price is not None
    assert policy.rebalancing.price.tiers == policy.tiers


def test_without_priorities_all_are_equal() -> None:
    policy = build(name="midstream", priorities=False, weights={"high": 20.0})
    assert {tier.weight for tier in policy.tiers.tiers} == {1.0}
    assert not policy.ranked


def test_parts_can_be_switched_off() -> None:
    assert isinstance(build(name="midstream", late_binding=False).line, Immediate)
    assert build(name="midstream", migrate=False).rebalancing.price is None
    assert build(name="midstream", price_moves=False).rebalancing.price is None
    assert build(name="llumnix", migrate=False).rebalancing.pairing is None


def test_values_compare() -> None:
    assert ADAPTER.validate_python({"name": "midstream"}) == MidstreamPolicy()
    assert ADAPTER.validate_python({"name": "llumnix", "targets": {"high": 1600}}) == LlumnixPolicy(targets={"high": 1600})


@pytest.mark.parametrize("values", [{"name": "other"}, {"name": "llumnix", "theta": 1}, {"name": "midstream", "ahead": -1}, {}])
def test_nonsense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(values)
