"""The command line: help everywhere, light, and flags that reach whom they are for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import cli, up
from deploy.settings import DeploySettings
from deploy.up import UpOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [[], ["up"], ["gateway"], ["backend"], ["bench"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: midstream" in capsys.readouterr().out


def test_help_is_light() -> None:
    code = "import json, sys\nfrom deploy.cli import main\n"
    code += "try: main(['--help'])\nfinally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    loaded = set(json.loads(run.stderr.splitlines()[-1]))
    assert not loaded & {"torch", "vllm", "transformers", "fastapi", "httpx", "aiohttp", "pydantic", "asyncio"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("midstream ")


def test_up_passes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[UpOptions] = []

    def run(options: UpOptions, settings: DeploySettings) -> int:
        seen.append(options)
        return 5

    monkeypatch.setattr(up, "run", run)
    flags = "--engine fake --instances 3 --model m --host 0.0.0.0 --port 81 --redis redis://r"
    assert cli.main(["up", *flags.split()]) == 5
    assert cli.main(["up"]) == 5
    assert seen == [UpOptions("fake", 3, "m", "0.0.0.0", 81, "redis://r"), UpOptions()]


def test_backend_passes_on_what_follows_the_dashes() -> None:
    own, rest = cli.split_at_dashes(
        ["backend", "--model", "m", "--port", "9", "--advertised-url", "http://h", "--", "--dtype", "half", "--", "x"]
    )
    options = cli.build_parser().parse_args(own)
    options.passed_on = rest
    assert cli.backend_arguments(options) == [
        *["--engine", "vllm", "--host", "127.0.0.1", "--port", "9", "--model", "m", "--advertised-url", "http://h"],
        *["--", "--dtype", "half", "--", "x"],
    ]


def test_only_backend_takes_arguments_after_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--", "--dtype", "half"]) == 2
    assert "no arguments after --" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--instances", "0"], ["--port", "70000"], ["--port", "x"], ["--engine", "other"]])
def test_nonsense_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["up", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
