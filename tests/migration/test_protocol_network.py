"""Both tables joined by a network that loses, repeats, delays and reorders, with sides that die, clients that leave, requests that finish.

One request, and some attempts to move it from the source to the destination. What happens next is always Hypothesis's choice; since
most walks would end in the first few steps of an attempt, one rule lets things go well for a while, and each run knows only some kinds of
trouble.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from migration.protocol import (
    SOURCE_BEFORE_COMMIT,
    SOURCE_START,
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

S, E, A = SourceState, SourceEvent, SourceAction
D, V, R = DestinationState, DestinationEvent, DestinationAction

ASKS = {
    A.PREPARE: V.PREPARE,
    A.RESERVE: V.RESERVE,
    A.GROW: V.RESERVE,
    A.COMMIT: V.COMMIT,
    A.ASK: V.QUERY,
    A.REVOKE: V.CANCEL,
    A.CANCEL: V.CANCEL,
}
LOCAL = {
    A.LOOK: [E.MOVABLE, E.UNMOVABLE],
    A.ANNOUNCE: [E.ANNOUNCED],
    A.PLAN: [E.LAST, E.MORE],
    A.SEND: [E.SENT],
    A.FREEZE: [E.FROZEN, E.CROWDED],
    A.THAW: [E.THAWED, E.FAILED],
}


ALWAYS = {"disorder", "impatience"}
TROUBLES = ["loss", "repetition", "calling off", "failure", "expiry", "source dies", "destination dies", "end"]


@dataclass(frozen=True)
class Said:
    """A message on its way; `ask` is the call that an answer belongs to, `key` what makes it a repetition."""

    epoch: int
    kind: DestinationEvent
    key: str
    ask: int
    tokens: int


@dataclass(frozen=True)
class Answered:
    ask: int
    event: SourceEvent


@dataclass
class LegHere:
    """A leg at the destination."""

    state: DestinationState = D.NEW
    answers: dict[str, SourceEvent] = field(default_factory=dict)
    working: Said | None = None
    held: bool = False
    tokens: int = 0
    running: bool = False
    known: bool = False


class Network(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client = 0  # tokens the client has seen
        self.client_there = True
        self.owner_died = False
        self.over = False  # the request finished, was given up, or died with its owner
        self.troubles: set[str] = set()
        # the source
        self.source_alive = True
        self.here = True  # the request is the source's
        self.frozen = False
        self.source_tokens = 0
        self.epoch = 0
        self.state, self.action = S.STAYED, A.STOP
        self.asked = 0
        self.stage = 0
        # the destination
        self.destination_alive = True
        self.legs: dict[int, LegHere] = {}
        # the network
        self.messages: list[Said] = []
        self.answers: list[Answered] = []

    # --- the source

    def source_running(self) -> bool:
        return self.source_alive and self.here and not self.frozen

    @initialize(troubles=st.sets(st.sampled_from(TROUBLES), max_size=2))
    def choose(self, troubles: set[str]) -> None:
        self.troubles = troubles | ALWAYS

    def knows(self, trouble: str) -> bool:
        return trouble in self.troubles

    def migrating(self) -> bool:
        return self.source_alive and self.state not in SOURCE_TERMINAL

    def source_meets(self, event: SourceEvent) -> None:
        self.state, self.action = source_step(self.state, event)
        if event in (E.FROZEN, E.CROWDED):
            self.frozen = True
        if event is E.THAWED:
            self.frozen = False
        died_with_its_owner = self.state is S.MOVED and self.owner_died and not any(leg.running for leg in self.legs.values())
        self.over = self.over or self.state is S.LOST or died_with_its_owner
        if self.state in (S.MOVED, S.LOST):
            self.here = self.frozen = False
        if self.action in ASKS:
            self.ask()

    def ask(self) -> None:
        self.asked += 1
        kind = ASKS[self.action]
        key = str(kind)
        if kind is V.RESERVE:
            self.stage += 1
            key = f"reserve {self.stage}"
        if self.destination_alive:
            self.messages.append(Said(self.epoch, kind, key, self.asked, self.source_tokens))

    def attempt_begins(self) -> None:
        self.epoch += 1
        self.state, self.action = SOURCE_START

    @precondition(lambda self: self.migrating() and self.action in LOCAL)
    @rule(data=st.data())
    def source_acts(self, data: st.DataObject) -> None:
        self.source_meets(data.draw(st.sampled_from(LOCAL[self.action])))

    @precondition(lambda self: self.knows("impatience") and self.migrating() and self.action in ASKS)
    @rule()
    def source_loses_patience(self) -> None:
        self.asked += 1  # an answer to the old call comes too late
        self.source_meets(E.SILENT if self.destination_alive else E.GONE)

    @precondition(lambda self: self.knows("impatience") and self.migrating() and self.state is S.ASKING)
    @rule()
    def source_gives_up(self) -> None:
        self.source_meets(E.UNRESOLVED)

    @precondition(lambda self: self.knows("calling off") and self.migrating() and self.state in SOURCE_BEFORE_COMMIT)
    @rule()
    def migration_is_called_off(self) -> None:
        self.source_meets(E.FAILED)

    def source_decodes(self) -> None:
        self.client_sees(self.source_tokens)
        self.source_tokens += 1

    @precondition(lambda self: self.knows("end") and self.source_running())
    @rule()
    def request_finishes_at_the_source(self) -> None:
        self.here = False
        self.over = True
        if self.migrating():
            self.source_meets(E.ENDED)

    @precondition(lambda self: self.knows("end"))
    @rule()
    def client_leaves(self) -> None:
        self.client_there = False
        self.over = True
        self.here = self.frozen = False
        if self.migrating():
            self.source_meets(E.ENDED)

    @precondition(lambda self: self.knows("source dies") and self.source_alive)
    @rule()
    def source_dies(self) -> None:
        self.owner_died = self.owner_died or self.here
        self.over = self.over or self.here
        self.source_alive = self.here = self.frozen = False

    @rule(until=st.sampled_from([S.PREPARING, S.SENDING, S.FREEZING, S.COMMITTING, S.COMMITTING]))
    def things_go_well(self, until: SourceState) -> None:
        for _ in range(20):
            if self.state is until:
                break
            self.one_step_goes_well()

    @rule()
    def one_step_goes_well(self) -> None:
        if self.answers:
            self.answer_comes(self.answers.pop(0))
        elif any(leg.working for leg in self.legs.values()):
            self.destination_does(next(leg for leg in self.legs.values() if leg.working), succeeds=True)
        elif self.messages:
            self.destination_hears(self.messages.pop(0))
        elif self.migrating() and self.action in LOCAL:
            self.source_meets(LOCAL[self.action][0])
        elif self.source_running():
            self.source_decodes()
            if self.epoch < 8 and not self.migrating():
                self.attempt_begins()
        elif self.source_alive and self.state is S.MOVED:
            self.comes_back()

    def comes_back(self) -> None:
        """By a migration the other way, which is no concern of these two tables."""
        for leg in self.legs.values():
            if leg.running:
                leg.running, self.here, self.source_tokens = False, True, leg.tokens

    # --- the network

    @precondition(lambda self: self.knows("disorder") and len(self.messages) > 1)
    @rule(data=st.data())
    def message_arrives(self, data: st.DataObject) -> None:
        said = self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))
        self.destination_hears(said)

    @precondition(lambda self: self.knows("loss") and self.messages)
    @rule(data=st.data())
    def message_is_lost(self, data: st.DataObject) -> None:
        self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))

    @precondition(lambda self: self.knows("repetition") and self.messages)
    @rule(data=st.data())
    def message_is_repeated(self, data: st.DataObject) -> None:
        self.messages.append(data.draw(st.sampled_from(self.messages)))

    @precondition(lambda self: self.knows("disorder") and len(self.answers) > 1)
    @rule(data=st.data())
    def answer_arrives(self, data: st.DataObject) -> None:
        self.answer_comes(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    def answer_comes(self, answered: Answered) -> None:
        if self.migrating() and self.action in ASKS and answered.ask == self.asked:
            self.source_meets(answered.event)

    @precondition(lambda self: self.knows("loss") and self.answers)
    @rule()
    def answers_are_lost(self) -> None:
        self.answers.clear()

    # --- the destination

    def destination_hears(self, said: Said) -> None:
        leg = self.legs.setdefault(said.epoch, LegHere())
        event = V.REPEATED if said.key in leg.answers else said.kind
        leg.state, action = destination_step(leg.state, event)
        match action:
            case R.ADMIT | R.GROW | R.ACTIVATE:
                leg.known = leg.held = True
                leg.working = said
            case R.JOIN:
                self.messages.append(said)  # waits
            case R.REPEAT:
                self.say(said, leg.answers[said.key])
            case R.REFUSE:
                self.say(said, E.REFUSED)
            case R.RELEASE:
                self.release(leg)
                self.say(said, self.standing(leg, said.kind))
            case R.ANSWER:
                self.say(said, self.standing(leg, said.kind))

    def standing(self, leg: LegHere, kind: DestinationEvent) -> SourceEvent:
        owner = leg.state is D.OWNER
        if kind is V.CANCEL:
            return E.TAKEN if owner else E.CANCELLED
        return E.OWNER if owner else E.FREE if leg.state is D.DROPPED else E.HELD

    def say(self, said: Said, event: SourceEvent) -> None:
        self.answers.append(Answered(said.ask, event))

    def release(self, leg: LegHere) -> None:
        leg.held = leg.running = False
        leg.working = None

    @precondition(lambda self: self.knows("failure") and any(leg.working for leg in self.legs.values()))
    @rule(data=st.data(), succeeds=st.booleans())
    def destination_acts(self, data: st.DataObject, succeeds: bool) -> None:
        self.destination_does(self.legs[data.draw(st.sampled_from([epoch for epoch, leg in self.legs.items() if leg.working]))], succeeds)

    def destination_does(self, leg: LegHere, succeeds: bool) -> None:
        said, leg.working = leg.working, None
        assert said
        answer = {V.PREPARE: E.PREPARED, V.RESERVE: E.RESERVED, V.COMMIT: E.COMMITTED}[said.kind] if succeeds else E.REFUSED
        leg.answers[said.key] = answer
        leg.state, action = destination_step(leg.state, V.DONE if succeeds else V.DENIED)
        if action is R.RELEASE:
            self.release(leg)
        elif leg.state is D.OWNER:
            leg.held, leg.running, leg.tokens = False, True, said.tokens
        self.say(said, answer)

    @precondition(lambda self: self.knows("expiry") and any(leg.state is D.RESERVED for leg in self.legs.values()))
    @rule(data=st.data(), event=st.sampled_from([V.EXPIRED, V.ENDED]))
    def reservation_is_lost(self, data: st.DataObject, event: DestinationEvent) -> None:
        leg = self.legs[data.draw(st.sampled_from([epoch for epoch, leg in self.legs.items() if leg.state is D.RESERVED]))]
        leg.state, action = destination_step(leg.state, event)
        assert action is R.RELEASE
        self.release(leg)

    @precondition(lambda self: any(leg.running for leg in self.legs.values()))
    @rule(goes_on=st.sampled_from([True, True, False]))
    def destination_decodes_or_ends(self, goes_on: bool) -> None:
        leg = next(leg for leg in self.legs.values() if leg.running)
        if goes_on and self.client_there:
            self.client_sees(leg.tokens)
            leg.tokens += 1
        else:
            leg.state, action = destination_step(leg.state, V.ENDED)
            assert action is R.NOTHING
            leg.running = False
            self.over = True

    @precondition(lambda self: self.knows("destination dies") and self.destination_alive)
    @rule()
    def destination_dies(self) -> None:
        """What was under way to a process dies with it: nothing reaches its successor."""
        self.owner_died = self.owner_died or any(leg.running for leg in self.legs.values())
        self.over = self.over or (not self.here and any(leg.running for leg in self.legs.values()))
        self.destination_alive = False
        self.legs.clear()
        self.messages.clear()

    @precondition(lambda self: not self.destination_alive)
    @rule()
    def destination_is_back(self) -> None:
        self.destination_alive = True

    # --- what must hold

    def client_sees(self, index: int) -> None:
        assert index <= self.client, "a token was lost"
        assert index == self.client or self.owner_died, "a token came twice"
        self.client = max(self.client, index + 1)

    @invariant()
    def at_most_one_owner(self) -> None:
        running = [epoch for epoch, leg in self.legs.items() if leg.running]
        if self.source_running():
            running.append(0)
        assert len(running) <= 1, f"owners: {running}"

    @invariant()
    def running_legs_are_owners_and_held_legs_are_not_dropped(self) -> None:
        for leg in self.legs.values():
            assert not leg.running or leg.state is D.OWNER
            assert not leg.held or leg.state in (D.PREPARING, D.RESERVED, D.RESERVING, D.COMMITTING)

    def teardown(self) -> None:
        """Then everything falls quiet: the network goes, actions fail, patience and reservations end."""
        self.messages.clear()
        self.answers.clear()
        for _ in range(50):
            if self.migrating():
                if self.action is A.THAW:
                    self.source_meets(E.THAWED)
                elif self.state is S.ASKING:
                    self.source_meets(E.UNRESOLVED)
                elif self.action in ASKS:
                    self.source_loses_patience()
                else:
                    self.source_meets(E.FAILED)
        self.messages.clear()
        for leg in self.legs.values():
            if leg.working:
                leg.working = None
                leg.state, action = destination_step(leg.state, V.DENIED)
                assert action is R.RELEASE
                self.release(leg)
            if leg.state is D.RESERVED:
                leg.state, _ = destination_step(leg.state, V.EXPIRED)
                self.release(leg)
        assert not self.migrating()
        assert not self.frozen, "a request was left frozen"
        assert not any(leg.held for leg in self.legs.values()), "a reservation was left"
        self.at_most_one_owner()
        assert self.over or self.source_running() or any(leg.running for leg in self.legs.values()), "the request was lost"


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=500, stateful_step_count=40, deadline=None, derandomize=True)
