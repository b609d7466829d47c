"""`.env.example` lists every setting there is, each with its meaning and its default; and none that there is not."""

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from deploy.env_example import render

EXAMPLE = Path(__file__).resolve().parents[2] / ".env.example"
SETTINGS = [
    ("gateway.settings", "GatewaySettings"),
    ("backend.llumlet.settings", "LlumletSettings"),
    ("backend.engine.vllm.settings", "KVSettings"),
    ("backend.engine.fake.settings", "FakeSettings"),
    ("deploy.settings", "DeploySettings"),
]
ENTRY = re.compile(r"^#? ?([A-Z][A-Z0-9_]*)=(.*)$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One variable of the example: its value there, and the comment above it."""

    value: str
    comment: str


def entries() -> Iterator[tuple[str, Entry]]:
    comment: list[str] = []
    for line in EXAMPLE.read_text().splitlines():
        if entry := ENTRY.match(line):
            yield entry[1], Entry(entry[2], " ".join(comment))
            comment = []
        elif line.startswith("#"):
            comment.append(line.lstrip("# "))
        else:
            comment = []


def settings(module: str, name: str) -> type[BaseSettings]:
    found: type[BaseSettings] = getattr(importlib.import_module(module), name)
    assert issubclass(found, BaseSettings)
    return found


def variables(model: type[BaseSettings]) -> dict[str, FieldInfo]:
    prefix = str(model.model_config.get("env_prefix", ""))

    def variable(name: str, field: FieldInfo) -> str:
        alias = field.validation_alias
        return alias if isinstance(alias, str) else f"{prefix}{name}".upper()

    return {variable(name, field): field for name, field in model.model_fields.items()}


SHARED = {name for name, times in Counter(v for where in SETTINGS for v in variables(settings(*where))).items() if times > 1}


@pytest.mark.parametrize(("module", "name"), SETTINGS)
def test_every_setting_is_listed_with_its_default_and_meaning(module: str, name: str) -> None:
    listed = dict(entries())
    for variable, field in variables(settings(module, name)).items():
        assert field.description, f"{name}: {variable} has no description"
        assert variable in listed, f"{variable} of {name} is not in .env.example"
        assert len(listed[variable].comment) > 10, f"{variable} has no meaning in .env.example"


@pytest.mark.parametrize(("module", "name"), SETTINGS)
def test_the_values_listed_are_the_defaults(module: str, name: str) -> None:
    listed = dict(entries())
    model = settings(module, name)
    for attribute, (variable, field) in zip(model.model_fields, variables(model).items(), strict=True):
        entry = listed[variable]
        if field.default_factory is not None or field.default is None:
            assert entry.value == "" or variable in SHARED, f"{variable} has no fixed default, but .env.example says {entry.value!r}"
        elif entry.value == "":
            assert variable in SHARED or field.default in ("", ()), f"{variable} has a default, but .env.example shows none"
            assert f"Default: {field.default}." in entry.comment or field.default in ("", ())
        else:
            given: dict[str, Any] = {attribute: entry.value}
            assert getattr(model(**given), attribute) == field.default, f"{variable}: .env.example says {entry.value!r}"


def test_it_is_what_the_settings_say() -> None:
    assert EXAMPLE.read_text() == render(), "run `make format`"


def test_nothing_is_listed_twice_or_unknown() -> None:
    names = [name for name, _ in entries()]
    known = {variable for module, name in SETTINGS for variable in variables(settings(module, name))}
    assert sorted(set(names)) == sorted(names)
    assert set(names) <= known


def test_the_example_is_safe_to_copy_as_it_is() -> None:
    """Every line is a comment or empty: copying the file changes nothing."""
    assert all(line.startswith("#") or not line for line in EXAMPLE.read_text().splitlines())
