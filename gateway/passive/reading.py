"""PURE. What was read off a plain OpenAI server, and the load report that makes of it. A figure that is not there is unknown, not zero.

capacity  = blocks x block size, of `vllm:cache_config_info`, summed over engines
free      = capacity x (1 - usage), of `vllm:kv_cache_usage_perc`
waiting tokens: the engine tells how many requests wait, not how long they are: the mean prompt so far stands for each
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from backend.registry.instance import InstanceKind, InstanceState, LoadReport, TierLoad
from gateway.passive.exposition import Sample, samples
from migration.leg import InstanceId

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"
_PREEMPTIONS = "vllm:num_preemptions_total"
_PROMPTS, _PROMPT_TOKENS = "vllm:request_prompt_tokens_count", "vllm:request_prompt_tokens_sum"
_NAMES = (_RUNNING, _WAITING, *_USAGE, _CACHE, _PREEMPTIONS, _PROMPTS, _PROMPT_TOKENS)

_TIER = "normal"
"""Of requests in an engine that knows no tiers."""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What /v1/models says. `max_model_tokens` is 0 where the server does not tell."""

    names: tuple[str, ...]
    max_model_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What /metrics says of all engines behind one server."""

    capacity_tokens: int
    free_tokens: int
    block_tokens: int
    running: int
    waiting: int
    waiting_tokens: int
    head_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Passive:
    """A plain OpenAI server, as it is known here. Its id is made of its address, so that all gateways call it alike."""

    id: InstanceId
    url: str


def read_models(raw: object) -> ServedModels:
    """Read /v1/models. Raises ValueError if it is not OpenAI's list."""
    cards = raw.get("data") if isinstance(raw, dict) else None
    if not isinstance(cards, list):
        raise ValueError("not a list of models")
    known = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
    lengths = [length for card in known if type(length := card.get("max_model_len")) is int]
    return ServedModels(tuple(card["id"] for card in known), max(lengths, default=0))


def read_figures(text: str) -> EngineFigures | None:
    """Read /metrics. None if what is needed to tell the load is not all there."""
    found = list(samples(text, _NAMES))
    running, waiting = _total(found, _RUNNING), _total(found, _WAITING)
    blocks = _blocks(found)
    usage = {_engine(sample): sample.value for sample in found if sample.name in _USAGE and math.isfinite(sample.value)}
    if running is None or waiting is None or not blocks or not blocks.keys() <= usage.keys():
        return None
    capacity = sum(count * size for count, size in blocks.values())
    used = sum(math.ceil(count * min(1.0, max(0.0, usage[engine]))) * size for engine, (count, size) in blocks.items())
    block = max(size for _, size in blocks.values())
    prompt = _mean_prompt_tokens(found, block)
    preemptions = _total(found, _PREEMPTIONS) or 0
    return EngineFigures(capacity, capacity - used, block, running, waiting, waiting * prompt, prompt if waiting else 0, preemptions)


def report_of(
    passive: Passive, models: ServedModels, figures: EngineFigures | None, incarnation: str, sequence: int, max_batch: int
) -> LoadReport:
    """The report of a server that answers. `max_batch` is assumed: no server tells it."""
    known = figures or EngineFigures(0, 0, 1, 0, 0, 0, 0, 0)
    held = known.capacity_tokens - known.free_tokens
    return LoadReport(
        instance=passive.id,
        incarnation=incarnation,
        sequence=sequence,
        url=passive.url,
        state=InstanceState.READY,
        models=models.names,
        engine="openai" if figures is None else "vllm",
        capacity_tokens=known.capacity_tokens,
        free_tokens=known.free_tokens,
        block_tokens=known.block_tokens,
        running=known.running,
        waiting=known.waiting,
        waiting_tokens=known.waiting_tokens,
        head_tokens=known.head_tokens,
        head_tier=_TIER if known.waiting else "",
        oldest_waiting_s=0.0,
        tiers=((_TIER, TierLoad(known.running, held)),) if known.running else (),
        preemptions=known.preemptions,
        migrations_in=0,
        migrations_out=0,
        max_batch=max_batch,
        max_model_tokens=models.max_model_tokens,
        kind=InstanceKind.PASSIVE,
        is_measured=figures is not None,
    )


def passive_at(address: str) -> Passive:
    """The server at a base URL, with or without a last `/v1`. Raises ValueError for anything but http or https."""
    url = address.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    scheme, separator, place = url.partition("://")
    if scheme.lower() not in ("http", "https") or not separator or not place or any(c in place for c in "?#@ \r\n\t"):
        raise ValueError(f"'{address}' is not the http address of a server")
    return Passive(InstanceId(place.lower()), url)


def _blocks(found: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """By engine: how many blocks, and tokens in each. Empty if one of them does not tell."""
    blocks = {}
    for sample in found:
        if sample.name == _CACHE:
            count, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
            if not (count.isdigit() and size.isdigit() and int(count) and int(size)):
                return {}
            blocks[_engine(sample)] = (int(count), int(size))
    return blocks


def _engine(sample: Sample) -> str:
    return sample.labels.get("engine", "0") or "0"


def _total(found: Sequence[Sample], name: str) -> int | None:
    values = [sample.value for sample in found if sample.name == name]
    return round(sum(values)) if values and all(math.isfinite(value) for value in values) else None


def _mean_prompt_tokens(found: Sequence[Sample], block_tokens: int) -> int:
    """In whole blocks; one block as long as no request has ended."""
    prompts, tokens = _total(found, _PROMPTS) or 0, _total(found, _PROMPT_TOKENS) or 0
    mean = -(-tokens // prompts) if prompts > 0 else 1
    return max(1, -(-mean // block_tokens)) * block_tokens
