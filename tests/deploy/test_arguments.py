import argparse
import os
import subprocess
import sys

import pytest

from deploy import cli
from deploy.arguments import numbers, server, store


def test_numbers_have_commas_between_them() -> None:
    assert numbers("7") == (7,)
    assert numbers("11, 12,13") == (11, 12, 13)


@pytest.mark.parametrize("text", ["", ",", "1,", "a", "1.5", "1;2"])
def test_what_is_no_number_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"not '{text}'"):
        numbers(text)


@pytest.mark.parametrize("command", [["compare", "s-s"], ["paper"]])
def test_bad_seeds_are_an_error_of_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--seeds", "one"])
    assert stopped.value.code == 2
    assert "--seeds: whole numbers with commas between them, not 'one'" in capsys.readouterr().err


def test_servers_and_stores_are_urls() -> None:
    assert server("https://gateway.example:8000/base") == "https://gateway.example:8000/base"
    assert store("rediss://u:p@h/0") == "rediss://u:p@h/0"
    for text in ("gateway", "ftp://gateway", "http://"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"not '{text}'"):
            server(text)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        store("u:secret@h")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "command", "wanted"),
    [
        ("MIDSTREAM_PORT", "abc", ["gateway"], "error: MIDSTREAM_PORT: input should be a valid integer"),
        ("MIDSTREAM_POLICY", "best", ["gateway"], "error: there is no policy 'best'; known: midstream, "),
        ("MIDSTREAM_POLICY_OPTIONS", "{", ["gateway"], "error: MIDSTREAM_POLICY_OPTIONS is not JSON: "),
        (
            "MIDSTREAM_REDIS_URL",
            "u:secret@h",
            ["gateway"],
            "error: MIDSTREAM_REDIS_URL: the address of the shared store is memory://, or begins ",
        ),
        ("MIDSTREAM_START_TIMEOUT_S", "0", ["up"], "error: MIDSTREAM_START_TIMEOUT_S: input should be greater than 0"),
        ("MIDSTREAM_START_TIMEOUT_S", "x", ["launcher"], "error: MIDSTREAM_START_TIMEOUT_S: input should be a valid number"),
        ("MIDSTREAM_PORT", "abc", ["keys", "list"], "error: MIDSTREAM_PORT: "),
    ],
)
def test_a_malformed_setting_is_named(
    variable: str, value: str, command: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as stopped:
        cli.main(command)
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(wanted)
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MIDSTREAM_REDIS_URL", "u:secret@h"), ("MIDSTREAM_INSTANCE_ID", "a/b"), ("MIDSTREAM_FAKE_CAPACITY_BLOCKS", "x")],
)
def test_a_backend_names_a_malformed_setting(variable: str, value: str) -> None:
    command = [sys.executable, "-m", "backend", "--engine", "fake"]
    done = subprocess.run(command, env={**os.environ, variable: value}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"error: {variable}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
