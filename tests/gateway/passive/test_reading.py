"""Reports of plain servers: what is told is read, and what is not told is unknown."""

from pathlib import Path

import pytest

from backend.registry.instance import InstanceKind, LoadReport
from gateway.passive.exposition import samples
from gateway.passive.reading import EngineFigures, ServedModels, passive_at, read_figures, read_models, report_of
from tests.gateway.passive.plain import METRICS


def test_figures_of_vllm() -> None:
    assert read_figures(METRICS) == EngineFigures(
        capacity_tokens=1600,
        free_tokens=1200,
        block_tokens=16,
        running=3,
        waiting=2,
        waiting_tokens=64,
        head_tokens=32,
        preemptions=7,
    )


def test_figures_of_a_real_vllm() -> None:
    """Of `vllm serve` 0.32.0, after one request of one token; capacity as its own kv_cache_size_tokens says."""
    text = (Path(__file__).parent / "vllm_metrics.txt").read_text()
    assert 'kv_cache_size_tokens="2097152"' in text
    assert read_figures(text) == EngineFigures(2097152, 2097152, 128, 0, 0, 0, 0, 0)


def test_figures_of_several_engines_behind_one_server_are_summed() -> None:
    other = METRICS.replace('engine="0"', 'engine="1"').replace("0.25", "0.5").replace('"100"', '"300"')
    figures = read_figures(METRICS + other)
    assert figures is not None
    assert (figures.capacity_tokens, figures.free_tokens) == (1600 + 4800, 1200 + 2400)
    assert (figures.running, figures.waiting, figures.preemptions) == (6, 4, 14)


@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "<html>no metrics</html>",
        METRICS.replace("vllm:num_requests_running{", "vllm:num_requests_sleeping{"),
        METRICS.replace("kv_cache_usage_perc", "kv_cache_usage"),
        METRICS.replace('num_gpu_blocks="100"', 'num_gpu_blocks="None"'),
        METRICS.replace("} 3.0", "} NaN"),
        METRICS.replace("} 0.25", "} NaN"),
        METRICS.replace("} 2.0", "} two"),
    ],
)
def test_a_figure_that_is_missing_makes_the_load_unknown(spoilt: str) -> None:
    assert read_figures(spoilt) is None
    report = report_of(passive_at("http://h:1"), ServedModels(("m",)), None, "g.1", 1, 256)
    assert not report.is_measured


def test_report_is_marked_and_survives_the_wire() -> None:
    report = report_of(passive_at("http://h:1/v1/"), ServedModels(("m",), 2048), read_figures(METRICS), "g.1", 4, 256)
    assert (report.instance, report.url, report.kind, report.is_measured) == ("h:1", "http://h:1", InstanceKind.PASSIVE, True)
    assert report.max_model_tokens == 2048
    assert LoadReport.from_json(report.to_json()) == report


def test_labels_may_hold_any_text() -> None:
    (sample,) = samples('x{a="1",b="}\\"\\\\ \\n,",} 5 1700000000\nxy 1\nx{', ("x",))
    assert (sample.labels, sample.value) == ({"a": "1", "b": '}"\\ \n,'}, 5.0)


def test_models() -> None:
    listed = {"data": [{"id": "a", "max_model_len": 10}, {"id": "b"}, {"nothing": 1}]}
    assert read_models(listed) == ServedModels(("a", "b"), 10)
    nothing: list[object] = [None, [], {"data": 3}]
    for nonsense in nothing:
        with pytest.raises(ValueError):
            read_models(nonsense)


@pytest.mark.parametrize("address", ["", "h:1", "ftp://h", "http://", "http://user:word@h", "http://h?x=1", "http://h\nx"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError):
        passive_at(address)
