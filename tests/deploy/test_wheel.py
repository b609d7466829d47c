"""What `pip install` brings: all packages with what they read, no tests, and a command that works away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "backend", "migration", "deploy", "simulator", "bench")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = target.glob("midstream-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target / "unpacked")
    return target / "unpacked"


def test_it_holds_every_module_and_scenario(installed: Path) -> None:
    wanted = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    wanted |= {path.relative_to(ROOT) for path in (ROOT / "simulator" / "scenarios").iterdir() if path.is_file()}
    assert not {str(path) for path in wanted if not (installed / path).is_file()}


def test_it_holds_nothing_else_at_the_top(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == set(PACKAGES)


def test_its_command_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import deploy.cli, sys; print(deploy.__file__); sys.exit(deploy.cli.main(['simulate', 'live-cpu']))"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "least_outstanding: 90 requests" in done.stdout
