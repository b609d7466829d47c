"""PURE. What the gateway looks at in the body of a request that it passes through: JSON, a form, or none."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.aliases import model_of_form, rename_model, rename_model_of_form
from gateway.large_body import look


@dataclass(frozen=True, slots=True)
class PassedBody:
    """`raw` is what goes on. `prompt_tokens` is an estimate."""

    raw: bytes
    model: str | None
    stream: bool
    prompt_tokens: int
    previous_response: str | None
    """The stored response that the request goes on from."""
    asked_model: str | None = None
    """The model by the name that the client has for it."""


def read_passed(body: bytes, content_type: str | None, aliases: Mapping[str, str]) -> PassedBody:
    """Look at a body. What cannot be read goes on as it is: the engine says what is wrong with it."""
    if content_type is not None and content_type.lower().startswith("multipart/"):
        named = model_of_form(body)
        own = aliases.get(named, named) if named else None
        if own is not None and own != named:
            body = rename_model_of_form(body, own)
        return PassedBody(body, own or None, False, 0, None, named or None)
    try:
        known, tokens = look(body)
    except ValueError:
        return PassedBody(body, None, False, 0, None)
    model, previous = known.get("model"), known.get("previous_response_id")
    asked = model if isinstance(model, str) else None
    if not isinstance(model, str):
        model = None
    elif model in aliases:
        model = aliases[model]
        body = rename_model(body, model)
    return PassedBody(body, model, known.get("stream") is True, tokens, previous if isinstance(previous, str) else None, asked)
