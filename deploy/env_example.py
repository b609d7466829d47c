"""Writes `.env.example` from the settings themselves, so that it lists each with its meaning and its default: `make format` runs it."""

import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from backend.engine.fake.settings import FakeSettings
from backend.engine.vllm.settings import KVSettings
from backend.llumlet.settings import LlumletSettings
from backend.peers.environment import variable
from deploy.settings import DeploySettings
from gateway.settings import GatewaySettings

FILE = Path(__file__).resolve().parent.parent / ".env.example"
SECTIONS: tuple[tuple[str, type[BaseSettings]], ...] = (
    ("Gateway", GatewaySettings),
    ("Backend (the llumlet in front of every engine)", LlumletSettings),
    ("KV blocks of vLLM engines", KVSettings),
    ("The fake engine", FakeSettings),
    ("midstream up", DeploySettings),
)
HEAD = """\
# Settings, with their defaults. Copy to .env and uncomment what is to differ; a variable of the environment wins over .env.
# Names end in their unit: _s seconds, _bytes, _tokens. A name that stands in two sections is listed once and means both.
"""
WIDTH = 120


def render() -> str:
    """The whole file."""
    seen: set[str] = set()
    text = [HEAD]
    for title, model in SECTIONS:
        text.append(f"\n# ---- {title} ----\n")
        for name, field in variables(model):
            if name not in seen:
                seen.add(name)
                text.append(entry(name, field))
    return "\n".join(text)


def variables(model: type[BaseSettings]) -> Iterator[tuple[str, FieldInfo]]:
    """The environment variable of each field."""
    for name, field in model.model_fields.items():
        yield variable(model, name), field


def entry(name: str, field: FieldInfo) -> str:
    """The meaning of a variable in each section that reads it, then its default, commented out."""
    shared = [(title, other) for title, model in SECTIONS for known, other in variables(model) if known == name]
    defaults = {shown(other) for _, other in shared}
    comments = []
    for title, other in shared:
        words = other.description or ""
        if len(defaults) > 1:
            words = f"{title}: {words} Default: {shown(other) or 'unset'}."
        if words not in comments:
            comments.append(words)
    lines = [f"# {line}" for comment in comments for line in textwrap.wrap(comment, WIDTH)]
    return "\n".join([*lines, f"#{name}={defaults.pop() if len(defaults) == 1 else ''}", ""])


def shown(field: FieldInfo) -> str:
    """A default as one writes it into the file; empty if there is none, or none that is fixed."""
    default = field.default
    if field.default_factory is not None or default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return str(default.value if isinstance(default, Enum) else default)


if __name__ == "__main__":
    FILE.write_text(render())
