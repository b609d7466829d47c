"""PURE. The few fields of an OpenAI request the gateway looks at. The body's bytes go on unchanged; the engine judges the rest."""

import json
from dataclasses import dataclass

from gateway.errors import MalformedBody

BYTES_PER_TOKEN = 4
"""Rule of thumb for an estimate; English text has about that many."""


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What the body says, as far as we look. `model` is None if absent (the engine has a default) or not a string."""

    model: str | None
    stream: bool
    n: int
    prompt_tokens: int
    """An estimate of the prompt's length."""
    priority: int | None = None
    """In vLLM's sense: lower first."""
    service_tier: str | None = None


def read_body(body: bytes) -> BodyFields:
    """Look at a request body. Raises MalformedBody if it is not a JSON object."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise MalformedBody("The body is not a JSON object.")
    model, n = raw.get("model"), raw.get("n")
    priority, service_tier = raw.get("priority"), raw.get("service_tier")
    return BodyFields(
        model=model if isinstance(model, str) else None,
        stream=raw.get("stream") is True,
        n=n if isinstance(n, int) else 1,
        prompt_tokens=_prompt_tokens(raw),
        priority=priority if isinstance(priority, int) and not isinstance(priority, bool) else None,
        service_tier=service_tier if isinstance(service_tier, str) else None,
    )


def _prompt_tokens(raw: dict[str, object]) -> int:
    if "messages" in raw:
        messages = raw["messages"]
        return sum(_message_tokens(message) for message in messages) if isinstance(messages, list) else 0
    return _tokens(raw.get("prompt"))


def _message_tokens(message: object) -> int:
    if not isinstance(message, dict):
        return 0
    content = message.get("content")
    if isinstance(content, list):
        return sum(_tokens(part.get("text")) for part in content if isinstance(part, dict))
    return _tokens(content)


def _tokens(prompt: object) -> int:
    """All four forms of a prompt: a text, token ids, a list of texts, a list of lists of token ids."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode(errors="replace")) // BYTES_PER_TOKEN)
    if isinstance(prompt, list):
        return sum(1 if isinstance(item, int) else _tokens(item) for item in prompt)
    return 0
