import pytest

from gateway.errors import RawHeaders
from gateway.openai import BodyFields
from gateway.policy.tier import Tier, Tiers, override_tiers
from gateway.priority import choose_tier

TIERS = Tiers()


def body(priority: int | None = None, service_tier: str | None = None) -> BodyFields:
    return BodyFields(None, True, 1, 1, False, 1, priority=priority, service_tier=service_tier)


def chosen(headers: RawHeaders = (), fields: BodyFields | None = None, tiers: Tiers = TIERS) -> str:
    choice = choose_tier(headers, fields or body(), tiers)
    assert choice.note is None
    return choice.tier.name


@pytest.mark.parametrize(
    ("header", "value", "tier"),
    [
        ("priority", " HIGH ", "high"),
        ("priority", "batch", "batch"),
        ("priority", "flex", "batch"),
        ("x-smg-priority", "system", "high"),
        ("x-smg-priority", "interactive", "high"),
        ("x-smg-priority", "default", "normal"),
        ("x-smg-priority", "bulk", "batch"),
        ("x-dynamo-request-priority", "7", "high"),
        ("x-dynamo-request-priority", "0", "normal"),
        ("x-gateway-inference-objective", "-1", "batch"),
        ("x-gateway-inference-objective", "batch", "batch"),
    ],
)
def test_headers(header: str, value: str, tier: str) -> None:
    assert chosen([(header.encode(), value.encode())]) == tier


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        (body(), "normal"),
        (body(priority=-3), "high"),
        (body(priority=0), "normal"),
        (body(priority=9), "batch"),
        (body(service_tier="priority"), "high"),
        (body(service_tier="auto"), "normal"),
        (body(service_tier="standard_only"), "normal"),
        (body(service_tier="flex"), "batch"),
        (body(priority=0, service_tier="flex"), "batch"),
        (body(priority=-1, service_tier="flex"), "high"),
    ],
)
def test_bodies(fields: BodyFields, tier: str) -> None:
    assert chosen(fields=fields) == tier


def test_the_header_wins_and_ours_before_others() -> None:
    theirs, ours = (b"x-smg-priority", b"bulk"), (b"priority", b"high")
    assert chosen([theirs, ours], body(priority=9)) == "high"
    assert chosen([theirs], body(priority=-9)) == "batch"


@pytest.mark.parametrize("value", ["10\r\nx: é", "u=1, i", "", "--1", "9" * 30])
@pytest.mark.parametrize("header", ["priority", "x-dynamo-request-priority"])
def test_what_is_not_understood_is_the_default_and_said(header: str, value: str) -> None:
    choice = choose_tier([(header.encode(), value.encode("latin-1"))], body(), TIERS)
    assert choice.tier.name == "normal"
    assert choice.note is not None
    assert choice.note.isascii()
    assert choice.note.isprintable()
    assert "high, normal, batch" in choice.note


def test_tiers_of_the_settings_count() -> None:
    tiers = override_tiers({"gold": {"rank": 0}, "high": None, "bulk": {"rank": 1, "weight": 1.0}}, "gold")
    assert chosen(tiers=tiers) == "gold"
    assert chosen([(b"priority", b"bulk")], tiers=tiers) == "bulk"
    assert chosen([(b"priority", b"system")], tiers=Tiers((Tier("only", 3),), "only")) == "only"
