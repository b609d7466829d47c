import csv
import io
from itertools import pairwise
from statistics import mean, stdev

import pytest

from simulator.workload import TRACES, Arrival, TraceError, csv_rows, generate, read_csv


def made(seed: int = 1, *, rate: float = 10.0, cv: float = 1.0, high_share: float = 0.1, requests: int = 4000) -> list[Arrival]:
    return generate("S-S", requests=requests, rate=rate, cv=cv, seed=seed, high_share=high_share)


@pytest.mark.parametrize("trace", TRACES)
def test_every_trace_can_be_made(trace: str) -> None:
    arrivals = generate(trace, requests=50, rate=1.0, cv=1.0, seed=1, high_share=0.0)
    assert len(arrivals) == 50
    assert {each.tier for each in arrivals} == {"normal"}


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    arrivals = made(cv=cv, requests=20_000)
    times = [0.0, *(each.arrival_s for each in arrivals)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)


def test_a_seed_is_a_workload() -> None:
    assert made(1) == made(1)
    assert made(1) != made(2)


def test_rate_burstiness_and_tiers_leave_the_lengths_alone() -> None:
    lengths = [(each.prompt_tokens, each.output_tokens) for each in made()]
    for other in (made(rate=3.0), made(cv=4.0), made(high_share=0.5)):
        assert [(each.prompt_tokens, each.output_tokens) for each in other] == lengths


def test_the_share_of_urgent_requests() -> None:
    assert mean(each.tier == "high" for each in made()) == pytest.approx(0.1, abs=0.02)


def test_a_trace_survives_the_file() -> None:
    arrivals = made(requests=20)
    file = io.StringIO()
    csv.writer(file).writerows(csv_rows(arrivals))
    file.seek(0)
    again = read_csv(file)
    assert [(each.prompt_tokens, each.output_tokens, each.tier) for each in again] == [
        (each.prompt_tokens, each.output_tokens, each.tier) for each in arrivals
    ]
    assert [each.arrival_s for each in again] == pytest.approx([each.arrival_s for each in arrivals], abs=1e-6)


def test_lines_may_come_in_any_order_and_without_a_tier() -> None:
    arrivals = read_csv(["arrival_s,prompt_tokens,output_tokens\n", "2,5,6\n", "1,3,4\n"])
    assert arrivals == [Arrival(1.0, 3, 4), Arrival(2.0, 5, 6)]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["arrival_s,prompt_tokens\n"], "no column 'output_tokens'"),
        (["arrival_s,prompt_tokens,output_tokens,colour\n"], "unknown column 'colour'"),
        (["arrival_s,prompt_tokens,output_tokens\n", "1,2,3\n", "1,x,3\n"], "line 3"),
        (["arrival_s,prompt_tokens,output_tokens\n", "1,2\n"], "line 2"),
        (["arrival_s,prompt_tokens,output_tokens\n", "1,0,3\n"], "line 2"),
        (["arrival_s,prompt_tokens,output_tokens\n", "nan,1,3\n"], "line 2"),
    ],
)
def test_nonsense_is_refused_by_line(lines: list[str], complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_csv(lines)
