from typing import Any

import pytest

from gateway.policy.view import ClusterView, InstanceView, ViewState
from gateway.scaling.choice import choose_departures
from gateway.scaling.launcher import Launched
from migration.leg import InstanceId
from tests.backend.registry.reports import a_report


def view(name: str, state: ViewState = ViewState.READY, claims: int = 0, claimed_tokens: int = 0, **fields: Any) -> InstanceView:
    return InstanceView(a_report(name, **{"free_tokens": 1000, **fields}), state, 0.1, claims, claimed_tokens)


def launched(name: str, order: int, *, stoppable: bool = True) -> Launched:
    return Launched(InstanceId(name), "m", order, 10.0, stoppable=stoppable)


ALL = [launched("a", 1), launched("b", 2), launched("c", 3)]


@pytest.mark.parametrize(
    ("views", "chosen"),
    [
        ([view("a", free_tokens=500), view("b", free_tokens=900), view("c", free_tokens=700)], ["b", "c", "a"]),
        ([view("a"), view("b"), view("c")], ["c", "b", "a"]),
        ([view("a"), view("b", waiting_tokens=10), view("c", claims=1, claimed_tokens=300)], ["a", "b", "c"]),
        ([view("a"), view("b", ViewState.DRAINING), view("c", ViewState.STARTING), view("d")], ["a"]),
    ],
)
def test_fewest_tokens_then_newest(views: list[InstanceView], chosen: list[str]) -> None:
    cluster = ClusterView(tuple(views))
    assert choose_departures(cluster, ALL, frozenset(), 9) == chosen
    assert choose_departures(cluster, ALL, frozenset(), 1) == chosen[:1]


def test_only_what_can_be_stopped_and_is_not_at_work() -> None:
    cluster = ClusterView((view("a"), view("b"), view("c")))
    some = [launched("a", 1), launched("b", 2, stoppable=False), launched("c", 3)]
    assert choose_departures(cluster, some, frozenset({InstanceId("c")}), 3) == ["a"]
