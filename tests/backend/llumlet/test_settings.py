import re

import pytest
from pydantic import ValidationError

from backend.llumlet.settings import LlumletSettings
from migration.settings import ReceptionSettings, SessionSettings


def test_an_instance_has_a_random_name_unless_it_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"i-[0-9a-f]{6}", LlumletSettings().instance_id)
    assert LlumletSettings().instance_id != LlumletSettings().instance_id
    monkeypatch.setenv("MIDSTREAM_INSTANCE_ID", "gpu-7")
    assert LlumletSettings().instance_id == "gpu-7"


@pytest.mark.parametrize(("name", "value"), [("REPORT_INTERVAL_S", "-1"), ("ATTACH_TIMEOUT_S", "soon"), ("INSTANCE_ID", "a b")])
def test_malformed_values_stop_the_process(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MIDSTREAM_{name}", value)
    with pytest.raises(ValidationError):
        LlumletSettings()


def test_the_defaults_are_those_of_the_migration_package() -> None:
    assert LlumletSettings().session() == SessionSettings()
    assert LlumletSettings().reception() == ReceptionSettings()


def test_every_knob_says_what_it_is_and_durations_carry_their_unit() -> None:
    for name, field in LlumletSettings.model_fields.items():
        assert field.description, name
        if field.annotation is float:
            assert name.endswith(("_s", "_bytes_per_s")), name
