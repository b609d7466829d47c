"""PURE. Other names of models. A request for an alias goes on with the model's own name: the one case in which a body's bytes change."""

import json
import re

from gateway.json_members import members

_MULTIPART_MODEL = re.compile(rb'(name="model"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n)([^\r\n]*)(?=\r\n)')


def rename_model(body: bytes, model: str) -> bytes:
    """A JSON body with that model; every other byte as it was. Raises ValueError if it is not a JSON object."""
    named = json.dumps(model).encode()
    parts, at = [], 0
    for member in members(body):
        if member.name == "model":
            parts += [body[at : member.start], named]
            at = member.end
    return b"".join([*parts, body[at:]])


def model_of_form(body: bytes) -> str | None:
    """The model that a multipart form names."""
    found = _MULTIPART_MODEL.search(body)
    return found[2].decode(errors="replace") if found else None


def rename_model_of_form(body: bytes, model: str) -> bytes:
    """The same for a multipart form."""
    return _MULTIPART_MODEL.sub(lambda found: found[1] + model.encode(), body, count=1)
