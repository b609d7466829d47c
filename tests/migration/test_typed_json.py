"""What the codec's types do not cover."""

from dataclasses import dataclass

import pytest

from migration.typed_json import decode, encode


@dataclass(frozen=True)
class Inner:
    ratio: float


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]
    note: str | None = None


@dataclass(frozen=True)
class Unsupported:
    items: list[int]


def test_error_says_where() -> None:
    with pytest.raises(ValueError, match=r"Outer\.inner: Inner\.ratio: expected float, got str"):
        decode(Outer, {"name": "x", "inner": [{"ratio": "1"}]})
    with pytest.raises(ValueError, match="Outer has no field 'nam'"):
        decode(Outer, {"nam": "x"})


def test_whole_number_is_a_float() -> None:
    decoded = decode(Outer, {"name": "x", "inner": [{"ratio": 1}]})
    assert decoded == Outer("x", (Inner(1.0),))
    assert type(decoded.inner[0].ratio) is float
    assert encode(decoded) == {"name": "x", "inner": [{"ratio": 1.0}], "note": None}


def test_type_without_a_json_form_is_a_programming_error() -> None:
    with pytest.raises(TypeError):
        decode(Unsupported, {"items": []})
