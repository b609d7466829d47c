import pytest
from pydantic import ValidationError

from gateway.policy.config import POLICIES
from gateway.policy.line import Immediate, LateBinding
from gateway.settings import GatewaySettings


def settings(**values: object) -> GatewaySettings:
    return GatewaySettings(**{"_env_file": None, **values})  # type: ignore[arg-type]


def test_late_binding_is_the_default() -> None:
    assert isinstance(settings().build_policy().line, LateBinding)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_named(name: str) -> None:
    assert isinstance(settings(policy=name).build_policy().line, LateBinding if name == "midstream" else Immediate)


def test_the_environment_holds_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_POLICY_OPTIONS", '{"ahead": 5, "weights": {"high": 3}}')
    monkeypatch.setenv("MIDSTREAM_TIERS", '{"batch": null, "normal": {"patience_s": 3}}')
    policy = settings().build_policy()
    assert isinstance(policy.line, LateBinding)
    assert policy.line.ahead == 5
    assert [(tier.name, tier.weight, tier.patience_s) for tier in policy.tiers.tiers] == [("high", 3, 60.0), ("normal", 1.0, 3)]
    assert policy.line.tiers == policy.tiers


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"policy": "best"}, "no policy 'best'; known: midstream, llumnix"),
        ({"policy_options": {"ahaed": 1}}, "policy 'midstream' has no parameter 'ahaed'"),
        ({"policy_options": {"ahead": -1}}, "policy 'midstream', 'ahead'"),
        ({"policy": "llumnix", "policy_options": {"targets": {"high": "x"}}}, "policy 'llumnix', 'targets.high'"),
        ({"policy_options": {"name": "llumnix", "ahead": 1}}, None),
        ({"tiers": {"high": {"wieght": 1}}}, "tier 'high': unknown key 'wieght'"),
        ({"default_tier": "gold"}, "the default 'gold'"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], complaint: str | None) -> None:
    if complaint is None:
        assert isinstance(settings(**values).build_policy().line, LateBinding)
        return
    with pytest.raises(ValidationError, match=complaint):
        settings(**values)
