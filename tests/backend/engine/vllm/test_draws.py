"""The random state of a seeded request after so many tokens, against a generator that drew them one by one."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the light environment has no vllm")

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, random_sample

from backend.engine.vllm.draws import seeded_generator

VOCABULARY = 300
CPU = torch.device("cpu")


def of_a_gpu(logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
    """What vLLM does on GPUs: noise over the whole vocabulary."""
    return random_sample(logits.softmax(dim=-1, dtype=torch.float32), generators), None


@pytest.fixture(autouse=True)
def kernels() -> None:
    current_platform.import_kernels()


@pytest.mark.parametrize("sample", [TopKTopPSampler().forward_cpu, of_a_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("draws", [1, 2, 40])
def test_it_stands_where_the_tokens_led(sample: Any, draws: int) -> None:
    widths: list[int] = []

    def noting(logits: torch.Tensor, *others: Any) -> Any:
        widths.append(logits.shape[-1])
        return sample(logits, *others)

    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY), sampler=SimpleNamespace(topk_topp_sampler=noting)
    )
    drawn = torch.Generator(device=CPU)
    drawn.manual_seed(17)
    for _ in range(draws):
        sample(torch.randn((1, VOCABULARY)), {0: drawn}, None, None)
    assert torch.equal(seeded_generator(runner, 17, draws, CPU).get_state(), drawn.get_state())
    assert widths[2:] == [1 if sample is not of_a_gpu else VOCABULARY] * draws
