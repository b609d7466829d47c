import io
import json
import logging
from pathlib import Path

import pytest

from gateway.request_log import RequestEntry, RequestLog, open_request_log
from tests.gateway.conftest import make_rig, until
from tests.gateway.scripted import Exchange, event

ENTRY = RequestEntry("ms-1", 12.0, "high", None, 9, 4, None, 0.5, "no_instance", "")
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def read(path: Path) -> list[RequestEntry]:
    return [RequestEntry.from_json(text) for text in path.read_text().splitlines()]


def test_a_line_comes_back_as_it_was() -> None:
    assert RequestEntry.from_json(ENTRY.to_json()) == ENTRY
    with pytest.raises(ValueError):
        RequestEntry.from_json(ENTRY.to_json().replace('"tier":"high",', ""))


async def test_lines_are_appended_in_wall_clock_seconds(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        async with open_request_log(path, lambda: 10.0) as log:
            log.write(ENTRY)
            assert len(read(path)[-1:]) == 1, "a line is there at once"
    assert [each.request for each in read(path)] == ["ms-1", "ms-1"]
    assert all(each.arrived_s > 1.7e9 for each in read(path))


async def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    async with open_request_log(None, lambda: 0.0) as log:
        log.write(ENTRY)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_lines_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = RequestLog(Full(), lambda: 0.0, 0.0)
    with caplog.at_level(logging.WARNING):
        log.write(ENTRY)
        log.write(ENTRY)
    assert caplog.text.count("No space left") == 1


async def test_ended_requests_are_logged_by_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with make_rig(request_log=path) as rig:
        backend = await rig.add("one")

        async def serve(exchange: Exchange) -> None:
            await exchange.stream(event(1, 0, (7,), TOKEN), event(1, 1, (), b"data: [DONE]\n\n"))

        backend.script = serve
        answer = await rig.ask(headers={"priority": "high", "x-request-id": "mine"})
        assert answer.status_code == 200
        assert (await rig.client.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (await rig.ask(model="other")).status_code == 404
        await until(lambda: len(path.read_text().splitlines()) == 2)
    served, refused = read(path)
    assert (served.tier, served.model, served.outcome, served.instance) == ("high", "m", "ok", "one")
    assert served.prompt_tokens > 0
    assert served.output_tokens == 1
    assert served.ttft_s is not None
    assert 0 < served.ttft_s <= served.e2e_s
    assert json.loads(path.read_text().splitlines()[0])["request"] == served.request
    assert (refused.model, refused.ttft_s, refused.instance, refused.output_tokens) == ("other", None, "", 0)
