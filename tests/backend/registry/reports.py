"""A load report as tests need one: an idle, ready instance, with whatever the test wants to be different."""

from dataclasses import replace
from typing import Any

from backend.registry.instance import InstanceState, LoadReport
from migration.leg import InstanceId

_IDLE = LoadReport(
    instance=InstanceId("i1"),
    incarnation="1",
    sequence=1,
    url="http://127.0.0.1:9",
    state=InstanceState.READY,
    models=("m",),
    engine="scripted",
    capacity_tokens=1000,
    free_tokens=900,
    block_tokens=16,
    running=0,
    waiting=0,
    waiting_tokens=0,
    head_tokens=0,
    head_tier="",
    oldest_waiting_s=0.0,
    tiers=(),
    preemptions=0,
    migrations_in=0,
    migrations_out=0,
    max_batch=8,
    max_model_tokens=4096,
)


def a_report(instance: str = "i1", **fields: Any) -> LoadReport:
    """That instance's report, with these fields instead of the usual ones."""
    return replace(_IDLE, instance=InstanceId(instance), **fields)
