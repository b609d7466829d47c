"""Decisions come out again as they were: from what they hold, and from their JSON."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.registry.instance import StepCost, TierLoad
from gateway.policy.config import LlumnixPolicy, MidstreamPolicy
from gateway.policy.decision import (
    Bind,
    Decision,
    Dispatch,
    Pairing,
    Release,
    Trade,
    from_json,
    pair_up,
    release_from,
    replay,
    scores,
    to_json,
)
from gateway.policy.dispatch import Cheapest, DispatchPolicy, Freest, LeastLoaded, LeastMemory, RoundRobin
from gateway.policy.line import Immediate, LateBinding, LinePolicy, LineView, Waiting
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, ViewState
from migration.choice import Move
from migration.leg import InstanceId, RequestId
from tests.gateway.policy.views import COST, cluster, instance, request

POLICIES: list[DispatchPolicy] = [RoundRobin(), LeastLoaded(), LeastMemory(), Freest(targets={"high": 800}), Cheapest()]
LINES: list[LinePolicy] = [Immediate(Cheapest()), LateBinding(), LateBinding(placement="freeness", ahead=0)]
RULES = [MidstreamPolicy().build(Tiers()).rebalancing, LlumnixPolicy().build(Tiers()).rebalancing]

loads = st.lists(
    st.tuples(st.integers(0, 1600), st.integers(0, 9), st.integers(0, 900), st.sampled_from(list(ViewState)), st.integers(0, 12)),
    max_size=6,
)


def seen(rows: list[tuple[int, int, int, ViewState, int]]) -> ClusterView:
    return cluster(
        *(
            instance(
                f"i{n}",
                held=held,
                running=running,
                waiting=(waiting,) if waiting else (),
                state=state,
                claims=claims,
                cost=COST if n % 2 else StepCost(),
                tiers=(("high", TierLoad(running, held)),) if n % 3 == 0 and running else None,
            )
            for n, (held, running, waiting, state, claims) in enumerate(rows)
        )
    )


def assert_replays(decision: Decision) -> None:
    assert replay(decision) == decision
    raw = json.loads(json.dumps(to_json(decision)))
    assert to_json(replay(from_json(raw))) == raw


@given(loads, st.sampled_from(POLICIES), st.integers(0, 2**32 - 1), st.integers(1, 1600), st.sampled_from(["high", "normal"]))
def test_a_dispatch(rows: list[tuple[int, int, int, ViewState, int]], policy: DispatchPolicy, seed: int, tokens: int, tier: str) -> None:
    where, asked = seen(rows), request("r", tokens, tier)
    decision = Dispatch(asked, policy, where, seed, tuple(policy.order(asked, where, Random(seed))))
    assert_replays(decision)
    assert [row["instance"] for row in scores(decision)] == [candidate.instance for candidate in decision.order]


@given(loads, st.sampled_from(LINES), st.integers(0, 2**32 - 1), st.lists(st.integers(1, 1600), max_size=6))
def test_a_line(rows: list[tuple[int, int, int, ViewState, int]], policy: LinePolicy, seed: int, prompts: list[int]) -> None:
    where = seen(rows)
    waiting = tuple(Waiting(request(f"r{n}", tokens), tokens, float(n)) for n, tokens in enumerate(prompts))
    line = LineView(waiting, 30.0)
    assert_replays(Bind(line, policy, where, seed, tuple(policy.bind(line, where, Random(seed)))))


@given(loads, st.integers(0, 1), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("def"), st.floats(0.001, 9)), max_size=6))
def test_pairs_and_trades(rows: list[tuple[int, int, int, ViewState, int]], number: int, offered: list[tuple[str, str, float]]) -> None:
    where, rules = seen(rows), RULES[number]
    assert_replays(Pairing(rules, where, pair_up(rules, where)))
    assert_replays(Release(rules, where, release_from(rules, where)))
    answers = tuple(
        (InstanceId(source), tuple(Move(RequestId(f"r{to}"), InstanceId(to), gain_s) for each, to, gain_s in offered if each == source))
        for source in "abc"
    )
    grants = tuple(rules.price.grants(dict(answers))) if rules.price else ()
    assert_replays(Trade(rules, where, answers, grants))


def test_a_head_that_goes_where_it_starts_is_not_let_go() -> None:
    blocked, full = instance("a", held=1500, running=2, waiting=(400,)), instance("b", held=1500, running=2)
    assert release_from(RULES[0], cluster(blocked, full)) == ("a",)
    assert release_from(RULES[0], cluster(blocked, full, instance("c"))) == ()
    assert release_from(RULES[1], cluster(blocked, full)) == ()


def test_other_rules_or_a_changed_record_do_not_give_the_same() -> None:
    where = cluster(instance("a", held=900, running=2), instance("b", held=100, running=1, claims=5))
    decision = Dispatch(request(), LeastLoaded(), where, 1, tuple(LeastLoaded().order(request(), where, Random(1))))
    raw = to_json(decision)
    assert [name for name, _ in raw["order"]] == ["a", "b"]  # type: ignore[attr-defined]
    changed = from_json({**raw, "policy": {"name": "infaas"}})
    assert replay(changed) != changed


@pytest.mark.parametrize(
    "nonsense", [{}, {"kind": "dispatch"}, {"kind": "hope", "view": []}, {"kind": "pairing", "view": [], "rules": 3, "pairs": []}]
)
def test_nonsense_is_no_decision(nonsense: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="decision"):
        from_json(nonsense)
