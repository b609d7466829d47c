"""`midstream launcher` before it serves: what it refuses, and what it opens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import build_parser
from deploy.launch.command import LauncherOptions, is_loopback, open_starter, run
from deploy.launch.processes import ProcessLauncher
from deploy.settings import DeploySettings

OPTIONS = LauncherOptions("process", "fake", None, "127.0.0.1", 8100, "127.0.0.1", "redis://127.0.0.1:9/0", "default", "auto", 0.0, 1.0)


def settings(tmp_path: Path, **fields: Any) -> DeploySettings:
    return DeploySettings(home=tmp_path, **fields)


def test_what_others_can_reach_needs_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(OPTIONS, host="0.0.0.0"), settings(tmp_path)) == 1
    assert "MIDSTREAM_LAUNCHER_TOKEN" in capsys.readouterr().err


def test_backends_need_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(OPTIONS, redis_url=None), settings(tmp_path)) == 1
    assert "Redis" in capsys.readouterr().err


async def test_processes_by_default(tmp_path: Path) -> None:
    starter = open_starter(OPTIONS, settings(tmp_path))
    assert isinstance(starter, ProcessLauncher)
    assert await starter.list() == []


def test_the_command_line() -> None:
    given = build_parser().parse_args(["launcher", "--kind", "ray", "--gpus", "0.5", "--redis", "redis://x"])
    assert (given.kind, given.engine, given.gpus, given.cpus, given.address, given.port) == ("ray", "vllm", 0.5, 1.0, "auto", 8100)


def test_who_can_reach_a_launcher() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("launcher.internal")
