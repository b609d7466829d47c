"""PURE. The few fields of a request the gateway looks at: of OpenAI's APIs and of Anthropic's. The body's bytes go on unchanged; the engine
judges the rest."""

import json
from dataclasses import dataclass

from gateway.errors import MalformedBody
from gateway.large_body import LARGE_BYTES, look

_LOGPROBS = "message.output_text.logprobs"
BYTES_PER_TOKEN = 4
"""Rule of thumb for an estimate; English text has about that many."""


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What the body says, as far as we look. `model` is None if absent (the engine has a default) or not a string."""

    model: str | None
    stream: bool
    n: int
    prompts: int
    """In one request for completions there may be several."""
    logprobs: bool
    prompt_tokens: int
    """An estimate of the prompt's length."""
    max_output_tokens: int = 0
    """What the answer may have, all choices together, as far as the body says; 0 if it does not."""
    logprobs_at_end: bool = False
    """Those of all tokens are told again at the end of a stream."""
    priority: int | None = None
    """In vLLM's sense: lower first."""
    service_tier: str | None = None


def read_body(body: bytes) -> BodyFields:
    """Look at a request body. Raises MalformedBody if it is not a JSON object."""
    try:
        raw, prompt_tokens = look(body) if len(body) >= LARGE_BYTES else (json.loads(body), None)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise MalformedBody("The body is not a JSON object.")
    model, n = raw.get("model"), raw.get("n")
    priority, service_tier = raw.get("priority"), raw.get("service_tier")
    choices = n if isinstance(n, int) else 1
    included = raw.get("include")
    at_end = isinstance(included, list) and _LOGPROBS in included
    return BodyFields(
        model=model if isinstance(model, str) else None,
        stream=raw.get("stream") is True,
        n=choices,
        prompts=_prompts(raw.get("prompt")),
        logprobs=at_end or (raw.get("logprobs") is not None and raw["logprobs"] is not False),
        logprobs_at_end=at_end,
        prompt_tokens=_prompt_tokens(raw) if prompt_tokens is None else prompt_tokens,
        max_output_tokens=_max_output_tokens(raw) * max(1, choices),
        priority=priority if isinstance(priority, int) and not isinstance(priority, bool) else None,
        service_tier=service_tier if isinstance(service_tier, str) else None,
    )


def _max_output_tokens(raw: dict[str, object]) -> int:
    stated = next((raw[name] for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if name in raw), None)
    return max(0, stated) if isinstance(stated, int) else 0


def _prompts(prompt: object) -> int:
    """How many prompts: a list of numbers is one."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _prompt_tokens(raw: dict[str, object]) -> int:
    before = sum(_content_tokens(raw.get(name)) for name in ("system", "instructions"))
    if "messages" in raw:
        return before + (_messages_tokens(raw["messages"]) if isinstance(raw["messages"], list) else 0)
    if "input" in raw:
        asked = raw["input"]
        return before + (_messages_tokens(asked) if isinstance(asked, list) else _tokens(asked))
    return _tokens(raw.get("prompt"))


def _messages_tokens(messages: list[object]) -> int:
    return sum(_content_tokens(message.get("content", message.get("output"))) for message in messages if isinstance(message, dict))


def _content_tokens(content: object) -> int:
    """A text, or parts with texts; what a tool has answered is a part with content of its own."""
    if isinstance(content, list):
        return sum(_content_tokens(part.get("text", part.get("content"))) for part in content if isinstance(part, dict))
    return _tokens(content) if isinstance(content, str) else 0


def _tokens(prompt: object) -> int:
    """All four forms of a prompt: a text, token ids, a list of texts, a list of lists of token ids."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN)
    if isinstance(prompt, list):
        return sum(1 if isinstance(item, int) else _tokens(item) for item in prompt)
    return 0
