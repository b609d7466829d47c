"""What `midstream up` starts, on which kind of machine, and with which share of it."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest

from deploy.health import can_listen
from deploy.machine import Machine
from deploy.model import NAME, NEEDED
from deploy.settings import DeploySettings
from deploy.up import (
    CPU_EXECUTOR,
    Model,
    UpOptions,
    backend_program,
    choose_model,
    gateway_program,
    leaves,
    reachable,
    run,
    vllm_arguments,
    vllm_environment,
    welcome,
    without_password,
)

CPU = Machine(gpus=(), cores=2)
GPUS = Machine(gpus=("0", "3"), cores=2)
URL = "redis://127.0.0.1:1/0"


def model_directory(path: Path, context_tokens: int) -> Model:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": context_tokens}))
    return Model(str(path), "served")


def test_the_fake_engine_needs_no_model_and_no_arguments() -> None:
    program = backend_program(0, 9001, UpOptions(engine="fake"), Model("fake", "fake"), URL, CPU)
    assert program.command[:5] == (sys.executable, "-m", "backend", "--engine", "fake")
    assert "--" not in program.command
    assert program.environment == {}


def test_a_backend_has_a_name_a_loopback_address_and_the_store() -> None:
    command = " ".join(backend_program(1, 9002, UpOptions(host="0.0.0.0"), Model("some/model", "some/model"), URL, CPU).command)
    assert (
        "--instance-id i2 --host 127.0.0.1 --port 9002 --advertised-url http://127.0.0.1:9002 --redis redis://127.0.0.1:1/0 -- " in command
    )


def test_on_the_cpu_each_engine_has_one_thread() -> None:
    environment = vllm_environment(0, CPU)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_on_gpus_each_engine_has_one_gpu_in_turn_and_nothing_of_the_cpu() -> None:
    environments = [vllm_environment(index, GPUS) for index in range(3)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0", "3", "0"]
    assert not any("CPU" in name or "OMP" in name for name in environments[0])
    assert vllm_arguments(Model("m", "m"), GPUS) == ["--served-model-name", "m", "--scheduling-policy", "priority"]


@pytest.mark.parametrize(("known", "used"), [(2048, "2048"), (131072, "8192")])
def test_the_context_is_clamped_to_the_model(tmp_path: Path, known: int, used: str) -> None:
    arguments = vllm_arguments(model_directory(tmp_path, known), CPU)
    assert arguments[arguments.index("--max-model-len") + 1] == used
    assert "--enforce-eager" in arguments
    assert arguments[arguments.index("--distributed-executor-backend") + 1] == CPU_EXECUTOR


def test_the_context_of_a_model_that_lies_elsewhere_is_left_to_the_engine() -> None:
    arguments = vllm_arguments(Model("org/model", "org/model"), CPU)
    assert arguments[arguments.index("--max-model-len") + 1] == "auto"


def test_no_hub_is_asked_for_a_model_that_lies_here(tmp_path: Path) -> None:
    local = backend_program(0, 1, UpOptions(), model_directory(tmp_path, 1), URL, CPU)
    distant = backend_program(0, 1, UpOptions(), Model("org/model", "org/model"), URL, CPU)
    assert local.environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in distant.environment


def test_the_gateway_listens_where_it_was_told_to() -> None:
    command = gateway_program(UpOptions(host="0.0.0.0", port=80), URL).command
    assert command[-6:] == ("--host", "0.0.0.0", "--port", "80", "--redis", URL)


def test_a_complete_default_model_is_not_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "models" / NAME
    directory.mkdir(parents=True)
    for name in NEEDED:
        (directory / name).touch()
    assert choose_model(UpOptions(), DeploySettings(home=tmp_path)) == Model(str(directory), NAME)


def test_a_model_that_is_named_is_passed_on_as_it_is(tmp_path: Path) -> None:
    settings = DeploySettings(home=tmp_path)
    assert choose_model(UpOptions(model="org/model"), settings) == Model("org/model", "org/model")
    assert choose_model(UpOptions(engine="fake"), settings) == Model("fake", "fake")


def test_gpus_are_counted_and_the_visible_ones_respected(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert Machine.look(None, tmp_path).gpus == ("0", "1", "2")
    assert Machine.look("2, 5", tmp_path).gpus == ("2", "5")
    assert Machine.look("", tmp_path).gpus == ()
    assert Machine.look(None, tmp_path / "absent").gpus == ()
    assert Machine.look("0", tmp_path / "absent").gpus == ()


def test_the_welcome_holds_a_request_that_is_json() -> None:
    text = welcome("http://127.0.0.1:8000", "tiny", 3.2, Path("logs"))
    body = json.loads(text.split("-d '")[1].split("'")[0])
    assert body["model"] == "tiny"
    assert body["stream"] is True


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_where_a_server_is_reached(host: str, address: str) -> None:
    assert reachable(host) == address


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert without_password(URL) == URL


def test_a_port_that_is_taken_is_reported_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not can_listen("127.0.0.1", port)
        assert run(UpOptions(engine="fake", port=port), DeploySettings(home=tmp_path)) == 1
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err
    assert can_listen("127.0.0.1", port)


def test_leaves_of_nested_groups() -> None:
    one, two = ValueError("1"), asyncio.CancelledError()
    assert leaves(BaseExceptionGroup("a", [ExceptionGroup("b", [one]), two])) == [one, two]


def test_there_is_no_tls_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = DeploySettings(home=tmp_path, tls_certificate=tmp_path / "certificate.pem")
    assert run(UpOptions(engine="fake"), settings) == 1
    assert "MIDSTREAM_TLS_CERTIFICATE" in capsys.readouterr().err
