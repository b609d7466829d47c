from collections import Counter

from bench.chaos.plan import LONGEST_MOMENT_S, Fault, Sizes, iterations

SIZES = Sizes(backends=4, gateways=2, requests=8)


def test_a_seed_is_a_plan() -> None:
    assert list(iterations(7, 30, SIZES)) == list(iterations(7, 30, SIZES))
    assert list(iterations(7, 30, SIZES)) != list(iterations(8, 30, SIZES))


def test_every_fault_comes_as_often_as_any_other() -> None:
    plan = list(iterations(1, 300, SIZES))
    dealt = Counter(one.fault for one in plan)
    assert set(dealt) == set(Fault)
    assert min(dealt.values()) >= 20
    assert sum(len(one.asked) for one in plan) >= 3000
    assert sum(len(one.ordered) for one in plan) >= 20


def test_targets_and_moments_are_of_the_fleet() -> None:
    for one in iterations(3, 100, SIZES):
        assert 0 <= one.target < (2 if one.fault.value.endswith("gateway") else 4)
        assert 0 <= one.at_s <= LONGEST_MOMENT_S
        assert all(0 <= asked.request < 8 and asked.gateway in (0, 1) for asked in one.asked)
        assert len({order.stream for order in one.ordered}) == 2
