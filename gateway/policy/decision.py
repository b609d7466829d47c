"""PURE. Decisions that can be made again: what was seen, by which rules, with which seed, and what came of it; to and from JSON.

`replay` computes a decision anew from what it says it saw. The same comes out, here and in a simulator: that is what its log is worth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Field, TypeAdapter, ValidationError

from backend.registry.instance import InstanceState, LoadReport
from backend.registry.store import Candidate
from gateway.policy.config import Rebalancing
from gateway.policy.dispatch import Cheapest, DispatchPolicy, Freest, LeastLoaded, LeastMemory, RoundRobin
from gateway.policy.line import Binding, Immediate, LateBinding, LinePolicy, LineView
from gateway.policy.load import dispatch_freeness, standing
from gateway.policy.price import placement_cost_s
from gateway.policy.rebalance import Grant, Pair
from gateway.policy.tier import Tiers
from gateway.policy.view import ClusterView, InstanceView, RequestView, ViewState
from migration.choice import Move
from migration.leg import InstanceId
from migration.typed_json import decode, encode


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A new request's place: the candidates, best first. `chosen` is the one whose claim succeeded; None: none did."""

    request: RequestView
    policy: DispatchPolicy
    cluster: ClusterView
    seed: int
    order: tuple[Candidate, ...]
    chosen: InstanceId | None = None
    kind: Literal["dispatch"] = "dispatch"


@dataclass(frozen=True, slots=True)
class Bind:
    """Places for some of those that wait in line."""

    line: LineView
    policy: LinePolicy
    cluster: ClusterView
    seed: int
    bindings: tuple[Binding, ...]
    kind: Literal["bind"] = "bind"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which instances give to which, for memory and for their queues."""

    rules: Rebalancing
    cluster: ClusterView
    pairs: tuple[Pair, ...]
    kind: Literal["pairing"] = "pairing"


@dataclass(frozen=True, slots=True)
class Trade:
    """Which of the moves that sources offered are made, for their price."""

    rules: Rebalancing
    cluster: ClusterView
    answers: tuple[tuple[InstanceId, tuple[Move, ...]], ...]
    grants: tuple[Grant, ...]
    kind: Literal["trade"] = "trade"


@dataclass(frozen=True, slots=True)
class Release:
    """Which instances are asked whom of their queue they let go."""

    rules: Rebalancing
    cluster: ClusterView
    sources: tuple[InstanceId, ...]
    kind: Literal["release"] = "release"


Decision: TypeAlias = Dispatch | Bind | Pairing | Trade | Release


def pair_up(rules: Rebalancing, cluster: ClusterView) -> tuple[Pair, ...]:
    """The pairs of the queue step, then those of the memory step; no instance is in two."""
    found: list[Pair] = []
    for step in (rules.queue, rules.pairing):
        if step is not None:
            taken = {each for pair in found for each in (pair.source, pair.destination)}
            found += [pair for pair in step.pairs(cluster) if not {pair.source, pair.destination} & taken]
    return tuple(found)


def release_from(rules: Rebalancing, cluster: ClusterView) -> tuple[InstanceId, ...]:
    """The sources of the release step, but for those whose queue the queue step sees to."""
    if rules.release is None:
        return ()
    seen_to = {pair.source for pair in rules.queue.pairs(cluster)} if rules.queue is not None else set()
    return tuple(source for source in rules.release.sources(cluster) if source not in seen_to)


def replay(decision: Decision) -> Decision:
    """The decision made again. Equal to the given one, unless somebody has changed the rules or the record."""
    match decision:
        case Dispatch():
            order = decision.policy.order(decision.request, decision.cluster, Random(decision.seed))
            return replace(decision, order=tuple(order))
        case Bind():
            bindings = decision.policy.bind(decision.line, decision.cluster, Random(decision.seed))
            return replace(decision, bindings=tuple(bindings))
        case Pairing():
            return replace(decision, pairs=pair_up(decision.rules, decision.cluster))
        case Release():
            return replace(decision, sources=release_from(decision.rules, decision.cluster))
        case Trade():
            price = decision.rules.price
            return replace(decision, grants=tuple(price.grants(dict(decision.answers))) if price else ())


def scores(decision: Dispatch) -> Sequence[Mapping[str, object]]:
    """What the candidates looked like, best first: freeness in tokens per running request and, where prices count, the price in seconds."""
    policy, request = decision.policy, decision.request
    rows: list[dict[str, object]] = []
    for candidate in decision.order:
        view = decision.cluster.find(candidate.instance)
        if view is None:
            continue
        targets = policy.targets if isinstance(policy, Freest) else {}
        freeness = dispatch_freeness(view, targets)
        row: dict[str, object] = {"instance": view.id, "claims": candidate.claims_seen}
        row["freeness"] = round(freeness, 3) if view.state is not ViewState.DRAINING else None
        if isinstance(policy, Cheapest):
            sums = standing(view, policy.tiers)
            row["price_s"] = placement_cost_s(
                view.report.cost,
                tokens=sums.tokens,
                requests=sums.requests,
                weight=sums.weight,
                prompt_tokens=request.prompt_tokens,
                own_weight=policy.tiers.find(request.tier).weight,
                steps=request.expected_output_tokens,
            )
        rows.append(row)
    return rows


def bind_scores(decision: Bind) -> Mapping[str, Sequence[Mapping[str, object]]]:
    """For each request that was bound: what the instances looked like, each on its own, the cheapest or freest first."""
    tiers = decision.policy.tiers if isinstance(decision.policy, LateBinding) else Tiers()
    bound = {binding.request for binding in decision.bindings}
    told = {}
    for waiting in decision.line.waiting:
        if waiting.view.request in bound:
            rule, seed = Cheapest(tiers=tiers), decision.seed
            order = tuple(rule.order(waiting.view, decision.cluster, Random(seed)))
            told[str(waiting.view.request)] = scores(Dispatch(waiting.view, rule, decision.cluster, seed, order))
    return told


# -- JSON

_BLANK = LoadReport(
    instance=InstanceId(""),
    incarnation="",
    sequence=0,
    url="",
    state=InstanceState.READY,
    models=(),
    engine="",
    capacity_tokens=0,
    free_tokens=0,
    block_tokens=0,
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
    max_batch=0,
    max_model_tokens=0,
)
_UNSEEN = frozenset(("incarnation", "sequence", "url", "engine"))
"""Of a report, what no policy looks at."""

_Rules: TypeAlias = Annotated[RoundRobin | LeastLoaded | LeastMemory | Freest | Cheapest, Field(discriminator="name")]
_NAMED = (RoundRobin, LeastLoaded, LeastMemory, Freest, Cheapest)


def to_json(decision: Decision) -> dict[str, object]:
    """JSON-able, compact: what is zero or usual in a report is left out."""
    told: dict[str, object] = {"kind": decision.kind, "view": [_view_to_json(view) for view in decision.cluster.instances]}
    match decision:
        case Dispatch():
            told |= {"request": _plain(RequestView, decision.request), "policy": _policy_to_json(decision.policy), "seed": decision.seed}
            told |= {"order": [[each.instance, each.claims_seen] for each in decision.order], "chosen": decision.chosen}
        case Bind():
            told |= {"line": _plain(LineView, decision.line), "policy": _line_to_json(decision.policy), "seed": decision.seed}
            told["bindings"] = _plain(tuple[Binding, ...], decision.bindings)
        case Pairing():
            told |= {"rules": _plain(Rebalancing, decision.rules), "pairs": _plain(tuple[Pair, ...], decision.pairs)}
        case Release():
            told |= {"rules": _plain(Rebalancing, decision.rules), "sources": list(decision.sources)}
        case Trade():
            told |= {"rules": _plain(Rebalancing, decision.rules), "grants": _plain(tuple[Grant, ...], decision.grants)}
            told["answers"] = {source: _plain(tuple[Move, ...], moves) for source, moves in decision.answers}
    return told


def from_json(raw: Mapping[str, Any]) -> Decision:
    """The inverse of to_json. Raises ValueError."""
    try:
        cluster = ClusterView(tuple(_view_from_json(each) for each in raw["view"]))
        match raw["kind"]:
            case "dispatch":
                order = tuple(Candidate(InstanceId(instance), claims) for instance, claims in raw["order"])
                policy = cast("DispatchPolicy", _adapter(_Rules).validate_python(raw["policy"]))
                request = _read(RequestView, raw["request"])
                return Dispatch(request, policy, cluster, raw["seed"], order, raw.get("chosen"))
            case "bind":
                line, bindings = _read(LineView, raw["line"]), _read(tuple[Binding, ...], raw["bindings"])
                return Bind(replace(line, waiting=tuple(line.waiting)), _line_from_json(raw["policy"]), cluster, raw["seed"], bindings)
            case "pairing":
                return Pairing(_read(Rebalancing, raw["rules"]), cluster, _read(tuple[Pair, ...], raw["pairs"]))
            case "release":
                return Release(_read(Rebalancing, raw["rules"]), cluster, tuple(InstanceId(each) for each in raw["sources"]))
            case "trade":
                answers = tuple((InstanceId(source), _read(tuple[Move, ...], moves)) for source, moves in raw["answers"].items())
                return Trade(_read(Rebalancing, raw["rules"]), cluster, answers, _read(tuple[Grant, ...], raw["grants"]))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ValueError(f"not a decision: {error!r}") from error
    raise ValueError(f"no kind of decision: {raw['kind']!r}")


def _view_to_json(view: InstanceView) -> dict[str, object]:
    blank, report = _blank(), cast("dict[str, object]", encode(view.report))
    told = {name: value for name, value in report.items() if name not in _UNSEEN and value != blank.get(name)}
    told |= {"state": view.state.value, "age_s": round(view.age_s, 4), "claims": view.claims, "claimed_tokens": view.claimed_tokens}
    return told


def _view_from_json(raw: Mapping[str, Any]) -> InstanceView:
    state = ViewState(raw["state"])
    known = {name: value for name, value in raw.items() if name not in ("state", "age_s", "claims", "claimed_tokens")}
    said = InstanceState.READY if state is ViewState.STALE else InstanceState(state.value)
    report = decode(LoadReport, {**_blank(), **known, "state": said.value})
    return InstanceView(report, state, raw["age_s"], raw["claims"], raw["claimed_tokens"])


@cache
def _blank() -> dict[str, object]:
    return cast("dict[str, object]", encode(_BLANK))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(kind: Any, value: object) -> Any:
    return _adapter(kind).dump_python(value, mode="json", warnings=False)


def _read(kind: Any, raw: object) -> Any:
    return _adapter(kind).validate_python(raw)


def _policy_to_json(policy: DispatchPolicy) -> object:
    """A policy that is none of ours is named, and cannot be read again."""
    return _plain(_Rules, policy) if isinstance(policy, _NAMED) else {"name": type(policy).__name__}


def _line_to_json(policy: LinePolicy) -> object:
    match policy:
        case Immediate():
            return {"name": "immediate", "dispatch": _policy_to_json(policy.dispatch)}
        case LateBinding():
            return {"name": "late_binding", **_plain(LateBinding, policy)}
        case _:
            return {"name": type(policy).__name__}


def _line_from_json(raw: Mapping[str, Any]) -> LinePolicy:
    rest = {name: value for name, value in raw.items() if name != "name"}
    match raw["name"]:
        case "immediate":
            return Immediate(cast("DispatchPolicy", _adapter(_Rules).validate_python(raw["dispatch"])))
        case "late_binding":
            return cast("LinePolicy", _read(LateBinding, rest))
    raise ValueError(f"no policy of a line: {raw['name']!r}")
