"""A two-layer Llama with random weights and the real tokenizer, for tests of real engines: it starts in seconds and means nothing.

`python -m deploy.tiny_model` makes it in a process of its own. The seed is fixed: the weights are the same everywhere.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from backend.peers.environment import read_or_exit
from deploy.model import CONVERT_TIMEOUT_S, NAME, NEEDED, ModelError, ensure_model, is_complete, publish, staging_directory
from deploy.settings import DeploySettings, child_environment

TINY_NAME = "tiny-llama"
SEED = 20240607
TOKENIZER_FILES = tuple(name for name in NEEDED if name not in ("config.json", "model.safetensors"))


def ensure_tiny_model(settings: DeploySettings) -> Path:
    """The tiny model's directory; made first if it is not there, in a child process. Raises ModelError."""
    target = settings.models / TINY_NAME
    if is_complete(target):
        return target
    ensure_model(settings)
    environment = child_environment({"MIDSTREAM_HOME": str(settings.home.resolve()), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"})
    try:
        subprocess.run([sys.executable, "-m", "deploy.tiny_model"], check=True, env=environment, timeout=CONVERT_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"could not make {TINY_NAME}: {error}") from error
    return target


def make_tiny(models: Path) -> Path:
    """Write the tiny model beside the real one, whose tokenizer and chat template it shares. Raises ModelError."""
    target, real = models / TINY_NAME, models / NAME
    if is_complete(target):
        return target
    if not is_complete(real):
        raise ModelError(f"{real} is needed first: python -m deploy.model")
    with staging_directory(models) as staging:
        made = staging / TINY_NAME
        write_random_weights(made, real)
        for name in TOKENIZER_FILES:
            shutil.copyfile(real / name, made / name)
        publish(made, target)
    return target


def write_random_weights(directory: Path, real: Path) -> None:
    """Weights and configuration; vocabulary, special tokens and context length are those of the real model."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    known = AutoConfig.from_pretrained(real)
    config = LlamaConfig(
        vocab_size=known.vocab_size,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
        max_position_embeddings=known.max_position_embeddings,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # Wider than a real model's: logits lie far enough apart that the next token depends on all of the context.
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def main() -> int:
    """Make the tiny model under MIDSTREAM_HOME."""
    try:
        path = make_tiny(read_or_exit(DeploySettings).models)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path} is ready", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
