"""Where the random state of a seeded request stands after so many tokens, in vLLM's V1 runner: it draws once a token.

What one draw takes from a generator differs with the device, the sampler and the width of the vocabulary. So the runner's own sampler
is let draw, on made-up logits; and on narrow ones, if that takes as much from the generator as a draw over the whole vocabulary.
"""

from typing import Any

import torch


def seeded_generator(runner: Any, seed: int, draws: int, device: torch.device) -> torch.Generator:
    """A generator of that seed after that many draws of the runner's sampler."""
    vocabulary = runner.model_config.get_vocab_size()
    sample = runner.sampler.topk_topp_sampler
    narrow, wide = _drawn(sample, seed, 1, 1, device), _drawn(sample, seed, 1, vocabulary, device)
    alike = torch.equal(narrow.get_state(), wide.get_state())
    return _drawn(sample, seed, draws, 1 if alike else vocabulary, device)


def _drawn(sample: Any, seed: int, draws: int, width: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    logits = torch.zeros((1, width), dtype=torch.float32, device=device)
    for _ in range(draws):
        sample(logits, {0: generator}, None, None)
    return generator
