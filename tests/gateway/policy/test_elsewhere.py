from dataclasses import replace
from random import Random

import pytest

from gateway.policy.config import MidstreamPolicy
from gateway.policy.elsewhere import elsewhere
from gateway.policy.line import Binding, LinePolicy, Waiting
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, InstanceView, RequestView, ViewState
from migration.leg import InstanceId, RequestId
from tests.backend.registry.reports import a_report

LINE: LinePolicy = MidstreamPolicy().build(Tiers()).line


def instance(name: str, free_tokens: int, *, waiting: int = 0) -> InstanceView:
    report = replace(
        a_report(name, running=4),
        capacity_tokens=16_000,
        free_tokens=free_tokens,
        block_tokens=16,
        waiting=waiting,
        waiting_tokens=1000 * waiting,
        head_tokens=1000 * bool(waiting),
        max_batch=256,
    )
    return InstanceView(report, ViewState.READY, 0.0, 4 + waiting, 400)


def place(*instances: InstanceView, now_s: float = 100.0) -> Binding | None:
    waiting = Waiting(RequestView(RequestId("r"), None, "normal", 900), 1000, 0.0)
    return elsewhere(waiting, InstanceId("a"), LINE, ClusterView(instances), now_s, 256.0, Random(1))


def test_it_goes_where_there_is_room() -> None:
    found = place(instance("a", 200, waiting=1), instance("b", 4000), instance("c", 100))
    assert found is not None
    assert (found.instance, found.ahead) == ("b", False)


def test_its_own_instance_is_no_other() -> None:
    assert place(instance("a", 9000, waiting=1), instance("b", 100)) is None


@pytest.mark.parametrize("now_s", [0.0, 1000.0])
def test_however_old_it_is_it_is_not_bound_ahead_of_room(now_s: float) -> None:
    assert place(instance("a", 200, waiting=1), instance("b", 900), instance("c", 900), now_s=now_s) is None


def test_queues_of_others_come_first() -> None:
    assert place(instance("a", 200, waiting=1), instance("b", 2000, waiting=1)) is None
