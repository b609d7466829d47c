"""A malformed variable stops the process, and says which it is."""

import pytest
from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from backend.peers.environment import MALFORMED, read_or_exit, variable


class Knobs(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="KNOBS_", env_file=None)

    port: int = Field(default=1, ge=0)
    names: dict[str, int] = {}
    secret: SecretStr = Field(default=SecretStr(""), max_length=5)
    home: int = Field(default=0, validation_alias="ELSEWHERE")

    @model_validator(mode="after")
    def _together(self) -> "Knobs":
        if self.port == 7 and not self.names:
            raise ValueError("port 7 needs names")
        return self


def said(capsys: pytest.CaptureFixture[str], **given: object) -> list[str]:
    with pytest.raises(SystemExit) as stopped:
        read_or_exit(Knobs, **given)
    assert stopped.value.code == MALFORMED
    return capsys.readouterr().err.splitlines()


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOBS_PORT", "2")
    assert read_or_exit(Knobs).port == 2
    assert read_or_exit(Knobs, port=3).port == 3


def test_each_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KNOBS_PORT", "-1")
    monkeypatch.setenv("KNOBS_NAMES", '{"a": "b"}')
    monkeypatch.setenv("ELSEWHERE", "far")
    port, names, home = said(capsys)
    assert port == "error: KNOBS_PORT: input should be greater than or equal to 0"
    assert names.startswith("error: KNOBS_NAMES, a: input should be a valid integer")
    assert home.startswith("error: ELSEWHERE: input should be a valid integer")


def test_what_is_wrong_together_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, port=7) == ["error: port 7 needs names"]


def test_what_is_not_json_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KNOBS_NAMES", "{a")
    (line,) = said(capsys)
    assert line.startswith("error: KNOBS_NAMES is not JSON: Expecting property name")


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KNOBS_SECRET", "hunter2hunter2")
    (line,) = said(capsys)
    assert line.startswith("error: KNOBS_SECRET: ")
    assert "hunter2" not in line


def test_a_variable_goes_by_its_prefix_or_its_alias() -> None:
    assert variable(Knobs, "port") == "KNOBS_PORT"
    assert variable(Knobs, "home") == variable(Knobs, "ELSEWHERE") == "ELSEWHERE"
