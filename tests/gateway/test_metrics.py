"""What /metrics tells of requests and instances, in one process and of several."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from backend.registry.instance import InstanceState
from gateway.metrics import MAX_NAMES, Metrics
from gateway.timing import RequestTimes, Timings
from tests.gateway.conftest import Rig, report
from tests.gateway.fake_fleet import metrics
from tests.gateway.scripted import WORDS, Exchange, answer_event, told

ROOT = Path(__file__).resolve().parents[2]


async def answers(exchange: Exchange) -> None:
    await exchange.head()
    for part in told():
        await exchange.send(part)
        await asyncio.sleep(0)
    await exchange.end()


async def test_times_by_tier_and_model(rig: Rig) -> None:
    (await rig.add("a", models=("m", "n"))).script = answers
    for model, tier in (("m", "high"), ("n", "normal"), ("n", "normal")):
        assert (await rig.ask(model=model, headers={"priority": tier})).status_code == 200
    assert (await rig.ask(model="unheard-of")).status_code == 404
    seen = await metrics(rig.url)

    def count(name: str, tier: str, model: str) -> float:
        return seen.get(f'midstream_gateway_{name}_count{{model="{model}",tier="{tier}"}}', 0)

    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        assert (count(name, "high", "m"), count(name, "normal", "n")) == (1, 2)
    assert count("itl_seconds", "high", "m") == len(WORDS) - 1
    assert seen['midstream_gateway_answers_total{model="other",outcome="model_not_found",tier="normal"}'] == 1
    assert not any("unheard-of" in name for name in seen)
    assert seen["midstream_gateway_dispatch_seconds_count"] == 3


async def test_a_plain_answer_has_times_too(rig: Rig) -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.head()
        for n in (1, 2, 3):
            await exchange.send(b"id: %d.0;7\n\n" % n)
        await exchange.send(answer_event(b"{}"))
        await exchange.end()

    (await rig.add("a")).script = plain
    assert (await rig.ask(stream=False)).status_code == 200
    seen = await metrics(rig.url)
    assert seen['midstream_gateway_ttft_seconds_count{model="m",tier="normal"}'] == 1
    assert seen['midstream_gateway_itl_seconds_count{model="m",tier="normal"}'] == 2


async def test_instances_are_told_of_while_they_are_there(rig: Rig) -> None:
    (await rig.add("a", running=2)).script = answers
    await rig.store.publish(replace(report("b", state=InstanceState.DRAINING), preemptions=7), ttl_s=1000)
    await rig.ask()
    seen = await metrics(rig.url)
    assert seen['midstream_gateway_instance_freeness{instance="a"}'] == 450
    assert seen['midstream_gateway_instance_freeness{instance="b"}'] == float("-inf")
    assert seen['midstream_gateway_instance_running{instance="a"}'] == 2
    assert seen['midstream_gateway_instance_preemptions_total{instance="b"}'] == 7
    assert seen['midstream_gateway_instance_state{instance="b",state="draining"}'] == 1
    assert seen['midstream_gateway_decisions_total{instance="a",kind="bind"}'] == 1
    for each in rig.backends:
        await rig.store.withdraw(each.id)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        while any('instance="a"' in name for name in await metrics(rig.url)):
            await asyncio.sleep(0.05)
    assert any('instance="b"' in name for name in await metrics(rig.url))


def test_tokens_that_are_told_again_count_once() -> None:
    registry = CollectorRegistry()
    times = RequestTimes(Timings(registry, "x"), "normal", 10.0)
    times.serve(None, ("m", "n"))
    for tokens, now_s in ((0, 10.1), (1, 10.5), (1, 10.6), (4, 10.8), (2, 10.9), (5, 11.5)):
        times.note_tokens(tokens, now_s)
    times.end("ok", 12.0)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"x_{name}", {"tier": "normal", "model": "m"})

    assert value("ttft_seconds_sum") == pytest.approx(0.5)
    assert value("itl_seconds_count") == 2
    assert value("itl_seconds_sum") == pytest.approx(1.0)
    assert value("tpot_seconds_sum") == pytest.approx(1.0 / 4)
    assert value("e2e_seconds_sum") == pytest.approx(2.0)


def test_names_of_instances_are_bounded_and_forgotten() -> None:
    counted = Metrics(CollectorRegistry())
    for number in range(MAX_NAMES + 10):
        counted.note_decision("move", f"i{number}")

    def value(instance: str) -> float | None:
        return counted.registry.get_sample_value("midstream_gateway_decisions_total", {"kind": "move", "instance": instance})

    assert (value("i0"), value("other"), value(f"i{MAX_NAMES}")) == (1, 10, None)
    counted.forget_others({"i0"})
    assert (value("i0"), value("i1"), value("other")) == (1, None, 10)


PROCESS = """
import sys
from prometheus_client import CollectorRegistry
from gateway.metrics import Metrics
metrics = Metrics(CollectorRegistry(), sys.argv[1])
metrics.note_decision("dispatch", "a")
metrics.timings.ttft_s.labels("normal", "m").observe(0.2)
metrics.live.inc()
metrics.forget_others(set())
sys.stdout.write(metrics.render().decode())
"""


def test_gateways_that_share_a_directory_tell_the_sums(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    text = ""
    for _ in range(2):
        command = [sys.executable, "-c", PROCESS, str(tmp_path)]
        text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=50).stdout
    assert 'midstream_gateway_decisions_total{instance="a",kind="dispatch"} 2.0' in text
    assert 'midstream_gateway_ttft_seconds_count{model="m",tier="normal"} 2.0' in text
