import argparse

import pytest

from deploy import cli
from deploy.arguments import numbers


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
