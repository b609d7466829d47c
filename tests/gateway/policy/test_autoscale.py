from gateway.policy.autoscale import DemandScaling, Fixed, FreenessRange, ScaleDecision, ScaleMemory, ScaleView
from gateway.policy.view import InstanceView, ViewState
from migration.leg import InstanceId
from tests.gateway.policy.views import cluster, instance


def look(now_s: float, *views: InstanceView, line: int = 0, memory: ScaleMemory | None = None) -> ScaleView:
    return ScaleView(cluster(*views), now_s, line, memory or ScaleMemory())


FULL = (instance("a", held=1500, running=10), instance("b", held=1400, running=10))
EMPTY = (instance("a", held=100, running=1), instance("b"))


def test_fixed_does_nothing() -> None:
    assert Fixed().decide(look(0.0, *FULL))[0] == ScaleDecision()


def test_a_low_mean_starts_one_after_a_while() -> None:
    rule = FreenessRange(hold_s=10.0)
    decision, memory = rule.decide(look(0.0, *FULL))
    assert decision == ScaleDecision()
    assert rule.decide(look(9.0, *FULL, memory=memory))[0] == ScaleDecision()
    decision, memory = rule.decide(look(10.0, *FULL, memory=memory))
    assert decision == ScaleDecision(start=1)
    assert memory.changed_s == 10.0
    starting = (*FULL, instance("c", state=ViewState.STARTING))
    _, memory = rule.decide(look(12.0, *starting, memory=memory))
    assert rule.decide(look(30.0, *starting, memory=memory))[0] == ScaleDecision()


def test_a_dip_in_between_starts_the_clock_again() -> None:
    rule = FreenessRange(hold_s=10.0, high_tokens=1e9)
    _, memory = rule.decide(look(0.0, *FULL))
    _, memory = rule.decide(look(5.0, *EMPTY, memory=memory))
    assert rule.decide(look(10.0, *FULL, memory=memory))[0] == ScaleDecision()


def test_a_high_mean_drains_the_one_with_fewest_running_and_keeps_the_minimum() -> None:
    rule = FreenessRange(hold_s=0.0)
    assert rule.decide(look(0.0, *EMPTY))[0] == ScaleDecision(drain=(InstanceId("b"),))
    assert FreenessRange(hold_s=0.0, min_instances=2).decide(look(0.0, *EMPTY))[0] == ScaleDecision()


def test_a_drain_is_cancelled_before_one_is_started() -> None:
    draining = instance("c", held=300, running=1, state=ViewState.DRAINING)
    assert FreenessRange(hold_s=0.0).decide(look(0.0, *FULL, draining))[0] == ScaleDecision(undrain=(InstanceId("c"),))


def test_the_maximum_is_kept() -> None:
    assert FreenessRange(hold_s=0.0, max_instances=2).decide(look(0.0, *FULL))[0] == ScaleDecision()
    assert DemandScaling(max_instances=2).decide(look(0.0, *FULL, line=9000))[0] == ScaleDecision()


def test_demand_starts_all_that_is_missing_at_once() -> None:
    decision, memory = DemandScaling(out_share=1.0).decide(look(0.0, *FULL, line=3 * 1600))
    assert decision == ScaleDecision(start=3)
    assert memory.changed_s == 0.0


def test_demand_takes_drains_back_first() -> None:
    draining = instance("c", held=300, running=1, state=ViewState.DRAINING)
    decision, _ = DemandScaling(out_share=1.0).decide(look(0.0, *FULL, draining, line=3 * 1600 - 300))
    assert decision == ScaleDecision(start=2, undrain=(InstanceId("c"),))


def test_starting_ones_count() -> None:
    starting = tuple(instance(name, state=ViewState.STARTING) for name in "cde")
    assert DemandScaling(out_share=1.0).decide(look(0.0, *FULL, *starting, line=3 * 1600))[0] == ScaleDecision()


def test_growth_is_prolonged_over_the_start_up_time() -> None:
    rule = DemandScaling(out_share=1.0, start_up_s=20.0)
    _, memory = rule.decide(look(0.0, *EMPTY))
    decision, _ = rule.decide(look(2.0, *EMPTY, line=400, memory=memory))
    assert decision == ScaleDecision(start=1)  # 500 tokens now, 200 more a second
    assert DemandScaling(out_share=1.0).decide(look(2.0, *EMPTY, line=400, memory=memory))[0].start == 0


def test_demand_shrinks_after_a_rest_by_the_emptiest() -> None:
    rule = DemandScaling(cool_down_s=10.0)
    rested = ScaleMemory(changed_s=0.0)
    assert rule.decide(look(9.0, *EMPTY, memory=rested))[0] == ScaleDecision()
    assert rule.decide(look(10.0, *EMPTY, memory=rested))[0] == ScaleDecision(drain=(InstanceId("b"),))
    assert rule.decide(look(10.0, *FULL, memory=rested))[0] == ScaleDecision()


def test_from_nothing_to_the_minimum() -> None:
    assert DemandScaling(min_instances=2).decide(look(0.0))[0] == ScaleDecision(start=2)
