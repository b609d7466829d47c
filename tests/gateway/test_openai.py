import json

import pytest

from gateway.errors import MalformedBody
from gateway.openai import BodyFields, read_body


def fields(**body: object) -> BodyFields:
    return read_body(json.dumps(body).encode())


def test_fields() -> None:
    assert fields(model="m", stream=True, n=2, prompt="12345678") == BodyFields("m", True, 2, 2)
    assert fields() == BodyFields(None, False, 1, 0)
    assert fields(model=5, stream="yes", n="x", prompt=None, messages=3) == BodyFields(None, False, 1, 0)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("a" * 9, 3), ("漢" * 4, 3), ([1, 2, 3], 3), (["abcd", "efgh"], 2), ([[1, 2], [3]], 3), ({"x": 1}, 0)]
)
def test_all_forms_of_a_prompt(prompt: object, tokens: int) -> None:
    assert fields(prompt=prompt).prompt_tokens == tokens


def test_messages() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "data:" + "x" * 1000}}, 7]
    assert fields(messages=[{"role": "user", "content": "abcdefgh"}, {"content": parts}, {"content": None}, "odd"]).prompt_tokens == 3


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        read_body(body)
