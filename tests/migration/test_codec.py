"""Every message and answer there and back, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migration.codec import answer_from_json, message_from_json, to_json
from migration.errors import ProtocolError
from migration.leg import InstanceId, Leg, RequestId
from migration.messages import (
    Cancel,
    Cancelled,
    ChannelOffer,
    Commit,
    Committed,
    HttpRequest,
    KVLayout,
    LegState,
    Prepare,
    Prepared,
    Query,
    Refusal,
    Reserve,
    Reserved,
    StateIs,
    TokenStep,
)
from migration.plan import MigrationMode

counts = st.integers(0, 2**40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
legs = st.builds(Leg, texts.map(RequestId), counts)
figures = st.floats(allow_nan=False)
logprobs = st.tuples(st.lists(counts, max_size=3).map(tuple), st.lists(figures, max_size=3).map(tuple), counts)
steps = st.lists(st.builds(TokenStep, counts, st.none() | logprobs), max_size=4).map(tuple)
layouts = st.builds(KVLayout, texts, texts, counts, counts, counts, counts, texts, texts)
offers = st.builds(ChannelOffer, texts, texts, st.lists(texts, max_size=2).map(tuple))
https = st.builds(HttpRequest, texts, st.lists(st.tuples(texts, texts), max_size=2).map(tuple), st.binary(max_size=50))

messages = st.one_of(
    st.builds(
        Prepare,
        legs,
        texts.map(InstanceId),
        st.sampled_from(MigrationMode),
        https,
        st.none() | counts,
        steps,
        counts,
        counts,
        layouts,
        st.none() | offers,
        texts,
    ),
    st.builds(Reserve, legs, counts, counts, counts, counts),
    st.builds(Commit, legs, steps, counts, counts, counts, counts, st.lists(st.binary(max_size=9), max_size=2).map(tuple)),
    st.builds(Cancel, legs, texts),
    st.builds(Query, legs),
)
answers = st.one_of(
    st.builds(Prepared, legs, counts),
    st.builds(Reserved, legs, counts),
    st.builds(Committed, legs),
    st.builds(Cancelled, legs, st.booleans()),
    st.builds(StateIs, legs, st.sampled_from(LegState)),
    st.builds(Refusal, legs, texts, texts),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(messages)
def test_message_round_trip(message: Any) -> None:
    assert message_from_json(json.loads(json.dumps(to_json(message)))) == message


@settings(max_examples=100, deadline=None, derandomize=True)
@given(answers)
def test_answer_round_trip(answer: Any) -> None:
    assert answer_from_json(json.loads(json.dumps(to_json(answer)))) == answer


@settings(max_examples=100, deadline=None, derandomize=True)
@given(messages, st.data())
def test_missing_surplus_and_mistyped_fields_are_rejected(message: Any, data: st.DataObject) -> None:
    raw = to_json(message)
    name = data.draw(st.sampled_from(sorted(raw)))
    damage = data.draw(st.sampled_from(["mistype", "surplus", "as an answer"]))
    with pytest.raises(ProtocolError):
        match damage:
            case "mistype":
                message_from_json(raw | {name: object()})
            case "surplus":
                message_from_json(raw | {"surprise": 1})
            case _:
                answer_from_json(raw)


def test_defaults_may_be_absent() -> None:
    raw = to_json(Cancel(Leg(RequestId("r"), 1), "why"))
    del raw["reason"]
    assert message_from_json(raw) == Cancel(Leg(RequestId("r"), 1))
    del raw["leg"]
    with pytest.raises(ProtocolError, match="Cancel lacks leg"):
        message_from_json(raw)


def test_minus_infinity_travels() -> None:
    """Engines give it for tokens that cannot be sampled."""
    commit = Commit(Leg(RequestId("r"), 1), (TokenStep(1, ((1, 2), (-0.5, float("-inf")), 1)),), 1, 1, 0, 1)
    assert message_from_json(json.loads(json.dumps(to_json(commit)))) == commit


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        "query",
        {},
        {"kind": "query"},
        {"kind": None},
        {"kind": ["query"]},
        {"kind": "committed", "leg": {"request": "r", "epoch": 1}},
        {"kind": "query", "leg": {"request": "r", "epoch": "1"}},
        {"kind": "query", "leg": {"request": "r", "epoch": True}},
        {"kind": "query", "leg": {"request": "r"}},
        {"kind": "query", "leg": ["r", 1]},
        {"kind": "commit", "leg": {"request": "r", "epoch": 1}, "sampler": ["not base64!"]},
    ],
)
def test_no_message(raw: object) -> None:
    with pytest.raises(ProtocolError):
        message_from_json(raw)
