"""A look at large bodies agrees with a parser about every body there is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.aliases import model_of_form, rename_model, rename_model_of_form
from gateway.errors import MalformedBody
from gateway.json_members import NotAnObject, members
from gateway.large_body import LARGE_BYTES
from gateway.openai import read_body

TEXT = st.text(alphabet=st.sampled_from('ab"\\\n[]{},: é🦛'), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, JSON, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_members_are_those_a_parser_finds(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert {each.name: json.loads(body[each.start : each.end]) for each in members(body)} == value


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b" ",
            b"[]",
            b"3",
            b"{",
            b'{"a"',
            b'{"a":',
            b'{"a":}',
            b'{"a":1',
            b'{"a":1,}',
            b'{"a" 1}',
            b'{"a":[}',
            b'{"a":"x}',
            b"{1:2}",
        ),
        *(b'{"a":[1,2', b'{"a":1}}', b'{"a":1} x', b'{"a":"\\"}', b"\xff\xfe", b'{"a":{"b":"]"}', b'{"\\x":1}'),
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnObject):
        list(members(body))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({"prompt": "x" * 400_000}, 100_000),
        ({"prompt": list(range(60_000))}, 60_000),
        ({"messages": [{"role": "user", "content": "y" * 400_000}]}, 100_000),
        ({"messages": [{"role": "user", "content": [{"image_url": {"url": "data:image/png;base64," + "A" * 400_000}}]}]}, 0),
        ({"messages": [{"role": "user", "content": [{"input_audio": {"data": "A" * 400_000}}, {"text": "z" * 4000}]}]}, 1_000),
    ],
)
def test_large_bodies_are_measured(prompt: dict[str, object], tokens: int) -> None:
    body = json.dumps({"model": "m", "stream": True, "n": 2, **prompt}).encode()
    assert len(body) > LARGE_BYTES
    fields = read_body(body)
    assert (fields.model, fields.stream, fields.n) == ("m", True, 2)
    assert tokens <= fields.prompt_tokens <= tokens * 1.01 + 20


def test_a_large_body_that_is_cut_is_malformed() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 300_000}).encode()
    for cut in (1, 2, 60_000):
        with pytest.raises(MalformedBody):
            read_body(body[:-cut])


def test_a_model_is_renamed_and_nothing_else_changes() -> None:
    body = b'{ "x" : {"model":"a"}, "model" :  "a" ,"messages":["\\"model\\":\\"a\\""]}'
    assert rename_model(body, 'b"') == b'{ "x" : {"model":"a"}, "model" :  "b\\"" ,"messages":["\\"model\\":\\"a\\""]}'
    assert rename_model(b'{"n":1}', "b") == b'{"n":1}'


def test_a_model_in_a_form() -> None:
    form = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xffRIFF\r\n--B\r\n'
    form += b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
    assert model_of_form(form) == "whisper"
    assert rename_model_of_form(form, "w\\1").count(b"w\\1") == 1
    assert rename_model_of_form(form, "whisper") == form
    assert model_of_form(b"--B--") is None
