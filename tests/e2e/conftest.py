"""One fleet of vLLM processes for all tests here that need real engines: starting it takes most of their time."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.model import ensure_model
from deploy.settings import DeploySettings
from deploy.up import Model, UpOptions
from tests.e2e.fleet import Fleet, open_fleet

BLOCK_TOKENS = 32
COPIED_BLOCKS_PER_S = 25
"""Slow enough for a copy to be hit: 800 tokens take a second."""
GATEWAY = {"MIDSTREAM_CLAIM_TTL_S": "3", "MIDSTREAM_REBALANCE": "false"}
FLAGS = [
    # In bf16 a token computed again may be another one, in its last bits and so in a draw; this way a resumed answer can be compared.
    *("--dtype", "float32"),
    *("--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "128"),
    *("--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # A small model left to itself fills a JSON answer with line breaks.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with real engines come last, so that none idles beside the others' clocks; and of them last those that end an engine."""
    late = ["test_preempted_vllm.py", "test_clients_vllm.py", "test_sdk_vllm.py", "test_scale_in_vllm.py", "test_deaths_vllm.py"]
    order = {name: place for place, name in enumerate(late, 1)}
    items.sort(key=lambda item: order.get(item.path.name, 0))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    pytest.importorskip("vllm", reason="the light environment has no vllm")
    settings = DeploySettings()
    path = ensure_model(settings)
    environment = {
        "MIDSTREAM_KV_CHUNK_BYTES": "1",  # a block at a time, so that the speed is even
        "MIDSTREAM_KV_BYTES_PER_S": str(COPIED_BLOCKS_PER_S * block_bytes(path)),
        "MIDSTREAM_COPY_FLOOR_BYTES_PER_S": str(COPIED_BLOCKS_PER_S * block_bytes(path) / 4),
        "MIDSTREAM_DRAIN_DEADLINE_S": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    async with open_fleet(
        tmp_path_factory.mktemp("logs"),
        UpOptions(engine="vllm", instances=2),
        Model(str(path), path.name),
        arguments=FLAGS,
        backend_environment=environment,
        gateway_environment=GATEWAY,
        at_once=False,
        start_timeout_s=240.0,
    ) as fleet:
        yield fleet


def block_bytes(model: Path) -> int:
    """Of one KV block in float32."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4 * BLOCK_TOKENS)
