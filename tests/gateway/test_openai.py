import json

import pytest

from gateway.errors import MalformedBody
from gateway.openai import BodyFields, read_body, read_tier


def fields(**body: object) -> BodyFields:
    return read_body(json.dumps(body).encode())


def test_fields() -> None:
    assert fields(model="m", stream=True, n=2, prompt="12345678") == BodyFields("m", True, 2, 1, False, 2)
    assert fields() == BodyFields(None, False, 1, 1, False, 0)
    assert fields(model=5, stream="yes", n="x", prompt=None, messages=3) == BodyFields(None, False, 1, 1, False, 0)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("a" * 9, 3), ("漢" * 4, 3), ([1, 2, 3], 3), (["abcd", "efgh"], 2), ([[1, 2], [3]], 3), ({"x": 1}, 0)]
)
def test_all_forms_of_a_prompt(prompt: object, tokens: int) -> None:
    assert fields(prompt=prompt).prompt_tokens == tokens


def test_how_many_prompts() -> None:
    prompts: list[object] = ["a", [1, 2, 3], [], None, ["a"], ["a", "b"], [[1], [2], [3]]]
    assert [fields(prompt=prompt).prompts for prompt in prompts] == [1, 1, 1, 1, 1, 2, 3]


def test_who_asks_for_log_probabilities() -> None:
    asked: list[dict[str, object]] = [{"logprobs": True}, {"logprobs": False}, {"logprobs": None}, {}, {"logprobs": 0}, {"logprobs": 2}]
    assert [fields(**body).logprobs for body in asked] == [True, False, False, False, True, True]


def test_messages() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "data:" + "x" * 1000}}, 7]
    assert fields(messages=[{"role": "user", "content": "abcdefgh"}, {"content": parts}, {"content": None}, "odd"]).prompt_tokens == 3


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        read_body(body)


def test_tiers() -> None:
    assert read_tier(None) == ("normal", None)
    assert read_tier(" HIGH ") == ("high", None)
    tier, note = read_tier("10\r\nx: é")
    assert tier == "normal"
    assert note is not None
    assert note.isascii()
    assert note.isprintable()
