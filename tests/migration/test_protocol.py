"""Transcripts: (event, state, action), line by line; and what must hold for the tables as a whole."""

import pytest

from migration.errors import ProtocolError
from migration.protocol import (
    DESTINATION_TABLE,
    RESULT_OF,
    SOURCE_BEFORE_COMMIT,
    SOURCE_START,
    SOURCE_TABLE,
    SOURCE_TERMINAL,
    DestinationAction,
    DestinationEvent,
    DestinationState,
    SourceAction,
    SourceEvent,
    SourceState,
    destination_step,
    source_step,
)

SOURCE_TRANSCRIPTS = {
    "live, two stages": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        more       reserving   reserve
        reserved   sending     send
        sent       planning    plan
        last       freezing    freeze
        frozen     committing  commit
        committed  moved       hand_over
    """,
    "nothing to copy": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        committed  moved       hand_over
    """,
    "unmovable": """
        unmovable  stayed      stop
    """,
    "refused": """
        movable    preparing   prepare
        refused    cancelling  cancel
        cancelled  stayed      stop
    """,
    "outgrown, and no room": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        crowded    growing     grow
        refused    thawing     thaw
        thawed     cancelling  cancel
        cancelled  stayed      stop
    """,
    "Committed lost": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        silent     asking      ask
        silent     asking      ask
        owner      moved       hand_over
    """,
    "Commit lost": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        silent     asking      ask
        held       revoking    revoke
        cancelled  thawing     thaw
        thawed     cancelling  cancel
        cancelled  stayed      stop
    """,
    "Commit late, overtaking the revocation": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        silent     asking      ask
        held       revoking    revoke
        taken      moved       hand_over
    """,
    "destination dead": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        gone       thawing     thaw
        thawed     cancelling  cancel
        gone       stayed      stop
    """,
    "destination silent for ever": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        silent     asking      ask
        unresolved lost        give_up
    """,
    "client leaves while frozen": """
        movable    preparing   prepare
        prepared   announcing  announce
        announced  planning    plan
        last       freezing    freeze
        frozen     committing  commit
        ended      cancelling  cancel
        taken      stayed      stop
    """,
}

DESTINATION_TRANSCRIPTS = {
    "live": """
        prepare    preparing   admit
        done       reserved    answer
        reserve    reserving   grow
        done       reserved    answer
        commit     committing  activate
        done       owner       answer
        ended      owner       nothing
        query      owner       answer
    """,
    "no memory": """
        prepare    preparing   admit
        denied     dropped     release
        repeated   dropped     refuse
        commit     dropped     refuse
    """,
    "source silent": """
        prepare    preparing   admit
        done       reserved    answer
        expired    dropped     release
        commit     dropped     refuse
    """,
    "asked before anything came": """
        query      dropped     answer
        prepare    dropped     refuse
    """,
    "repetitions": """
        prepare    preparing   admit
        prepare    preparing   join
        done       reserved    answer
        repeated   reserved    repeat
        commit     committing  activate
        commit     committing  join
        cancel     committing  join
        query      committing  join
        done       owner       answer
        repeated   owner       repeat
        cancel     owner       answer
    """,
    "cancelled while being admitted": """
        prepare    preparing   admit
        cancel     dropped     release
        cancel     dropped     answer
    """,
    "client leaves while blocks arrive": """
        prepare    preparing   admit
        done       reserved    answer
        commit     committing  activate
        ended      dropped     release
        query      dropped     answer
    """,
}


def lines(transcript: str) -> list[list[str]]:
    return [line.split() for line in transcript.strip().splitlines()]


@pytest.mark.parametrize("name", SOURCE_TRANSCRIPTS)
def test_source_transcript(name: str) -> None:
    state, action = SOURCE_START
    assert action is SourceAction.LOOK
    for event, expected_state, expected_action in lines(SOURCE_TRANSCRIPTS[name]):
        state, action = source_step(state, SourceEvent(event))
        assert (state, action) == (expected_state, expected_action)
    assert state in SOURCE_TERMINAL


@pytest.mark.parametrize("name", DESTINATION_TRANSCRIPTS)
def test_destination_transcript(name: str) -> None:
    state = DestinationState.NEW
    for event, expected_state, expected_action in lines(DESTINATION_TRANSCRIPTS[name]):
        state, action = destination_step(state, DestinationEvent(event))
        assert (state, action) == (expected_state, expected_action)


def test_the_end_of_the_request_is_legal_wherever_a_migration_is_under_way() -> None:
    for state in set(SourceState) - SOURCE_TERMINAL:
        assert source_step(state, SourceEvent.ENDED)[0] in (SourceState.STAYED, SourceState.CANCELLING)


def test_giving_up_is_legal_until_commit_is_sent() -> None:
    assert {state for state, event in SOURCE_TABLE if event is SourceEvent.FAILED} == SOURCE_BEFORE_COMMIT | {SourceState.THAWING}


def test_terminal_states_have_no_way_out_and_all_others_have() -> None:
    assert set(SourceState) - {state for state, _ in SOURCE_TABLE} == SOURCE_TERMINAL
    assert {state for state, _ in SOURCE_TABLE.values()} == set(SourceState) - {SourceState.LOOKING}


def test_every_state_can_reach_an_end() -> None:
    reaching = set(SOURCE_TERMINAL)
    while True:
        more = {state for (state, _), (after, _) in SOURCE_TABLE.items() if after in reaching} - reaching
        if not more:
            break
        reaching |= more
    assert reaching == set(SourceState)


def test_only_an_answered_promise_or_a_dead_peer_leads_from_commit_to_thaw() -> None:
    unsure = {SourceState.COMMITTING, SourceState.ASKING, SourceState.REVOKING}
    promises = {SourceEvent.REFUSED, SourceEvent.GONE, SourceEvent.FREE, SourceEvent.CANCELLED}
    assert {event for (state, event), (after, _) in SOURCE_TABLE.items() if state in unsure and after is SourceState.THAWING} == promises


def test_an_owner_is_dropped_by_nothing_and_nothing_else_becomes_one() -> None:
    assert {after for (state, _), (after, _) in DESTINATION_TABLE.items() if state is DestinationState.OWNER} == {DestinationState.OWNER}
    assert [key for key, (after, _) in DESTINATION_TABLE.items() if after is DestinationState.OWNER and key[0] is not after] == [
        (DestinationState.COMMITTING, DestinationEvent.DONE)
    ]


def test_a_dropped_leg_stays_dropped() -> None:
    assert {after for (state, _), (after, _) in DESTINATION_TABLE.items() if state is DestinationState.DROPPED} == {
        DestinationState.DROPPED
    }


def test_what_is_held_is_released_whenever_a_leg_is_dropped() -> None:
    for (state, _), (after, action) in DESTINATION_TABLE.items():
        if after is DestinationState.DROPPED and state not in (DestinationState.NEW, DestinationState.DROPPED):
            assert action is DestinationAction.RELEASE


def test_every_message_is_foreseen_in_every_state() -> None:
    messages = {DestinationEvent.RESERVE, DestinationEvent.CANCEL, DestinationEvent.QUERY}
    for state in DestinationState:
        for message in messages:
            destination_step(state, message)
        prepared = state not in (DestinationState.NEW, DestinationState.PREPARING)
        destination_step(state, DestinationEvent.REPEATED if prepared else DestinationEvent.PREPARE)
        committed = state is DestinationState.OWNER
        destination_step(state, DestinationEvent.REPEATED if committed else DestinationEvent.COMMIT)


def test_illegal_event_names_state_and_event() -> None:
    with pytest.raises(ProtocolError, match=r"moved.*committed"):
        source_step(SourceState.MOVED, SourceEvent.COMMITTED)
    with pytest.raises(ProtocolError, match=r"owner.*expired"):
        destination_step(DestinationState.OWNER, DestinationEvent.EXPIRED)


def test_every_failure_has_a_result() -> None:
    into_cleanup = {event for (_, event), (after, _) in SOURCE_TABLE.items() if after in (SourceState.CANCELLING, SourceState.THAWING)}
    resolved = {SourceEvent.FREE, SourceEvent.CANCELLED, SourceEvent.THAWED}  # only after one of the others
    assert into_cleanup - resolved <= set(RESULT_OF)
