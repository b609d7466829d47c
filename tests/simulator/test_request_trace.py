from pathlib import Path

import pytest

from deploy import cli
from gateway.request_log import RequestEntry
from simulator.request_trace import trace_of
from simulator.workload import Arrival, TraceError, read_csv


def line(arrived_s: float, tokens: int = 4, prompt: int = 9, tier: str = "normal", outcome: str = "ok") -> str:
    return RequestEntry("r", arrived_s, tier, "m", prompt, tokens, 0.1, 0.5, outcome, "i1").to_json() + "\n"


def test_a_log_is_a_trace_from_its_first_arrival_on() -> None:
    trace = trace_of([line(1007.5, 3, tier="high"), "\n", line(1000.25, 2, prompt=0)])
    assert trace.arrivals == (Arrival(0.0, 1, 2), Arrival(7.25, 9, 3, "high"))
    assert trace.skipped == 0


def test_what_has_no_token_has_no_length() -> None:
    trace = trace_of([line(1.0, 0, outcome="no_instance"), line(2.0, 5, outcome="client_left")])
    assert trace.arrivals == (Arrival(0.0, 9, 5),)
    assert trace.skipped == 1


@pytest.mark.parametrize("broken", ["{", "[]", '{"request": "r"}', line(1.0).replace('"e2e_s":0.5', '"e2e_s":"0.5"')])
def test_a_line_that_is_none_is_named(broken: str) -> None:
    with pytest.raises(TraceError, match="line 2 of the log"):
        trace_of([line(1.0), broken])


def test_the_command_prints_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line(5.0) + line(6.0, 0))
    assert cli.main(["trace", str(log)]) == 0
    shown = capsys.readouterr()
    assert read_csv(shown.out.splitlines()) == [Arrival(0.0, 9, 4)]
    assert "1 requests without a token" in shown.err
    log.write_text("no\n")
    assert cli.main(["trace", str(log)]) == 2
    assert "line 1 of the log" in capsys.readouterr().err
