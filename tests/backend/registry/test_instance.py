"""The load report's wire form."""

import json
from dataclasses import replace

import pytest

from backend.registry.instance import InstanceKind, LoadReport, StepCost, TierLoad


def test_round_trip(report: LoadReport) -> None:
    full = replace(report, tiers=(("high", TierLoad(1, 20)), ("normal", TierLoad(2, 30))), cost=StepCost(0.01, 1e-6, 1e-4, 0.02, 5000.0))
    assert LoadReport.from_json(full.to_json()) == full
    assert LoadReport.from_json(report.to_json().encode()) == report


def test_size_does_not_grow_with_requests(report: LoadReport) -> None:
    assert len(replace(report, running=100_000, waiting=100_000).to_json()) < len(report.to_json()) + 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("state", "asleep"),
        ("models", "m"),
        ("models", [1]),
        ("tiers", [["high"]]),
        ("tiers", [["high", {"running": "1", "tokens": 1}]]),
        ("free_tokens", "900"),
        ("free_tokens", True),
        ("free_tokens", None),
        ("free_tokens", 1.5),
        ("oldest_waiting_s", "0"),
        ("cost", {"base_s": "x"}),
        ("cost", [1]),
        ("surprise", 1),
    ],
)
def test_malformed_field_is_rejected(report: LoadReport, field: str, value: object) -> None:
    raw = json.loads(report.to_json()) | {field: value}
    for separators in ((", ", ": "), (",", ":")):  # the second is how we write it, and is parsed in another way
        with pytest.raises(ValueError):
            LoadReport.from_json(json.dumps(raw, separators=separators))


def test_missing_field_is_rejected(report: LoadReport) -> None:
    for name in json.loads(report.to_json()):
        raw = json.loads(report.to_json())
        del raw[name]
        if name in ("cost", "kind", "is_measured"):
            read = LoadReport.from_json(json.dumps(raw))
            assert name != "cost" or read.cost == StepCost()
            assert (read.kind, read.is_measured) == (InstanceKind.LLUMLET, True)
        else:
            with pytest.raises(ValueError):
                LoadReport.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "null", "[]", "1", "{", "{}", '"x"', b"\xff\xfe"])
def test_not_a_report(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        LoadReport.from_json(text)
