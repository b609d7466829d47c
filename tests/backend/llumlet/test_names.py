import json
import re

import pytest

from backend.llumlet.names import Names

DRAWN = re.compile(rb'"(?:id|item_id|call_id)":"([^"]*)"')


def events(salt: str) -> list[bytes]:
    """An answer as vLLM tells it, with names drawn anew for each salt."""
    response, message, call = (f"{kind}_{salt * 16}" for kind in ("resp", "msg", "fc"))
    told = [
        {"type": "response.created", "response": {"id": response, "created_at": 1}},
        {"item": {"id": message}},
        {"item_id": message, "delta": '"id":"msg_0123456789abcdef" \\" naïve 漢'},
        {"item": {"id": call, "call_id": f"chatcmpl-tool-{salt * 16}"}},
        {"item_id": call, "delta": '{"id":"msg_0123456789abcdef"}'},
        {"response": {"id": response, "output": [{"id": message}, {"id": call, "call_id": f"chatcmpl-tool-{salt * 16}"}]}},
    ]
    return [b"data: " + json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n" for one in told]


def renamed(salt: str, request: str = "R", body: bytes = b"{}") -> list[bytes]:
    names = Names(request, body)
    return [names.rename(event) for event in events(salt)]


def test_another_run_of_the_same_request_has_the_same_names() -> None:
    assert renamed("a") == renamed("b")
    assert renamed("a") != renamed("a", request="S")
    assert [len(one) for one in renamed("a")] == [len(one) for one in events("a")]


def test_each_part_keeps_its_own_name_and_kind() -> None:
    before, after = (DRAWN.findall(b"".join(told)) for told in (events("a"), renamed("a")))
    assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after)) == 4
    for drawn, shown in zip(before, after, strict=True):
        assert drawn != shown
        assert re.sub(rb"[0-9a-f]{16}$", b"", drawn) == re.sub(rb"[0-9a-f]{16}$", b"", shown)


def test_nothing_else_changes() -> None:
    def bare(told: list[bytes]) -> bytes:
        return DRAWN.sub(b"", b"".join(told))

    assert bare(renamed("a")) == bare(events("a"))


def test_what_the_client_has_named_keeps_its_name() -> None:
    body = b'{"request_id":"resp_aaaaaaaaaaaaaaaa"}'
    assert b'"id":"resp_aaaaaaaaaaaaaaaa"' in renamed("a", body=body)[0]
    assert b"msg_aaaaaaaaaaaaaaaa" not in renamed("a", body=body)[1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (b'"call_id":"call_0123456789abcdef"', True),
        (b'"call_id":"aB3dE6gH1"', True),
        (b'"call_id":"functions.get_weather:0"', False),
        (b'"id":"chatcmpl-R"', False),
        (b'"id":"pmpt_1"', False),
        (b'"call_id":null', False),
        (b'"name":"msg_0123456789abcdef"', False),
    ],
)
def test_which_names_are_drawn(name: bytes, changes: bool) -> None:
    shown = Names("R", b"{}").rename(b"data: {" + name + b"}\n\n")
    assert (shown != b"data: {" + name + b"}\n\n") is changes
    assert len(shown) == len(name) + 10
