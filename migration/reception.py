"""The destination's side of migrations: performs what DESTINATION_TABLE decides, for every leg that comes to this instance.

It holds reservations, never requests: once a leg is OWNER, the request is the llumlet's like any other.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from migration.errors import ChannelError, ChannelTimeout, MigrationError, ProtocolError, Refused, RequestEnded
from migration.leg import InstanceId, Leg
from migration.messages import (
    Answer,
    Cancel,
    Cancelled,
    Commit,
    Committed,
    LegState,
    Message,
    Prepare,
    Prepared,
    Query,
    Refusal,
    Reserve,
    Reserved,
    StateIs,
)
from migration.plan import MigrationMode
from migration.ports import Arrivals, DestinationEngine
from migration.protocol import DestinationAction, DestinationEvent, DestinationState, destination_step
from migration.settings import ReceptionSettings

_logger = logging.getLogger(__name__)

_Key = tuple[type[Message], int]
"""What makes a message a repetition of another one of the same leg."""


@dataclass(eq=False, slots=True)
class _Reception:
    """What is known of one leg. `held` is what arriving legs are counted by: from admission until owned or released."""

    leg: Leg
    heard_s: float
    state: DestinationState = DestinationState.NEW
    held: bool = False
    prepare: Prepare | None = None
    answers: dict[_Key, Answer] = field(default_factory=dict)
    work: asyncio.Task[None] | None = None
    receives: set[asyncio.Task[None]] = field(default_factory=set)
    failure: MigrationError | None = None
    watch: asyncio.Task[None] | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def prepared(self) -> Prepare:
        if self.prepare is None:
            raise ProtocolError(f"{self.leg} was not prepared here")
        return self.prepare


class Receptions:
    """Answers the messages of all legs that come to this instance; an async context manager, entered before the first message."""

    def __init__(self, engine: DestinationEngine, arrivals: Arrivals, settings: ReceptionSettings, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._settings = settings
        self._clock = clock
        self._known: dict[Leg, _Reception] = {}
        self._group = asyncio.TaskGroup()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._sweeper = self._group.create_task(self._sweep())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing = True
        if self._sweeper:
            self._sweeper.cancel()
        held = [reception for reception in self._known.values() if reception.held]
        for reception in held:
            if reception.state is not DestinationState.DROPPED:
                self._drop(reception)
        await self._group.__aexit__(kind, error, trace)

    @property
    def arriving(self) -> int:
        """Legs admitted here and not yet owned."""
        return sum(reception.held for reception in self._known.values())

    async def answer(self, message: Message) -> Answer:
        """Total: whatever a peer sends gets an answer."""
        reception = self._known.get(message.leg)
        if reception is None:
            reception = self._known[message.leg] = _Reception(message.leg, self._clock())
        while True:
            reception.heard_s = self._clock()
            if self._closing:
                return self._say_closing(reception, message)
            try:
                reception.state, action = destination_step(reception.state, _event(reception, message))
            except ProtocolError as error:
                return Refusal(message.leg, error.reason, str(error))
            if action is not DestinationAction.JOIN:
                return await self._act(reception, action, message)
            if reception.work:
                await asyncio.wait([reception.work])

    async def supersede(self, leg: Leg) -> None:
        """The request goes on here as `leg`, by another way than a move: what is left of its other legs goes, and none of them comes."""
        known = self._known.setdefault(leg, _Reception(leg, self._clock()))
        known.state = DestinationState.OWNER
        await self._clear_older(leg)

    def expire(self) -> None:
        """Drop reservations that come to nothing: their source fell silent, or a transfer failed. Forget legs that ended long ago.

        Called now and then by itself.
        """
        now_s = self._clock()
        for leg, reception in list(self._known.items()):
            silent_s = now_s - reception.heard_s
            useless = silent_s >= self._settings.reservation_timeout_s or reception.failure is not None
            if reception.state is DestinationState.RESERVED and not reception.receives and useless:
                why = reception.failure or f"its source has been silent for {silent_s:.0f} s"
                _logger.warning("%s: reservation dropped: %s", leg, why)
                self._befall(reception, DestinationEvent.EXPIRED)
            elif _is_over(reception) and silent_s >= self._settings.remember_s:
                del self._known[leg]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.reservation_timeout_s / 4))
            self.expire()

    async def _act(self, reception: _Reception, action: DestinationAction, message: Message) -> Answer:
        match action, message:
            case DestinationAction.ADMIT, Prepare():
                reception.held = True
                return await self._work(reception, message, self._admit(reception, message))
            case DestinationAction.GROW, Reserve():
                return await self._work(reception, message, self._grow(reception, message))
            case DestinationAction.ACTIVATE, Commit():
                return await self._work(reception, message, self._activate(reception, message))
            case DestinationAction.REPEAT, _:
                return reception.answers[_key(message)]
            case DestinationAction.REFUSE, _:
                return _refusal(reception, message)
            case DestinationAction.RELEASE, _:
                self._release(reception)
        return _standing(reception, message)

    async def _work(self, reception: _Reception, message: Message, action: Awaitable[Answer]) -> Answer:
        """Its own task, so that it outlives the peer's patience; a repetition joins it."""
        work = reception.work = self._group.create_task(self._perform(reception, message, action))
        await asyncio.wait([work])
        return reception.answers.get(_key(message)) or _refusal(reception, message)

    async def _perform(self, reception: _Reception, message: Message, action: Awaitable[Answer]) -> None:
        event = DestinationEvent.DENIED
        try:
            answer = await action
            event = DestinationEvent.DONE
        except MigrationError as error:
            answer = Refusal(reception.leg, error.reason, str(error))
        except TimeoutError:
            answer = Refusal(reception.leg, "timeout")
        except Exception:
            _logger.exception("%s: unexpected error at the destination", reception.leg)
            answer = Refusal(reception.leg, "internal")
        if reception.state is not DestinationState.DROPPED:  # else the leg ended just as its action did
            reception.answers[_key(message)] = answer
            self._befall(reception, event)

    def _befall(self, reception: _Reception, event: DestinationEvent) -> None:
        reception.state, action = destination_step(reception.state, event)
        if action is DestinationAction.RELEASE:
            self._release(reception)

    async def _admit(self, reception: _Reception, prepare: Prepare) -> Answer:
        leg, engine = prepare.leg, self._engine
        self._check(prepare)
        reception.prepare = prepare
        async with asyncio.timeout(self._settings.prepare_timeout_s):
            await self._clear_older(leg)
            if prepare.channel:
                await engine.accept_channel(prepare.source, prepare.channel)
            await self._arrivals.admit(prepare)
            reception.watch = self._group.create_task(self._watch(reception))
            cached_tokens = await engine.reserve(leg, prepare.steps, prepare.room_tokens) if prepare.room_tokens else 0
        return Prepared(leg, cached_tokens)

    def _check(self, prepare: Prepare) -> None:
        ours, theirs = self._engine.layout(), prepare.layout
        # Tokens alone can be exchanged by engines that lay out their memory differently.
        copies = prepare.channel is not None and prepare.mode is not MigrationMode.RECOMPUTE
        if theirs != ours if copies else theirs.model != ours.model:
            raise Refused(f"here {ours}, there {theirs}", reason="layout")
        if self.arriving > self._settings.max_migrations_in:
            raise Refused(f"{self.arriving - 1} are arriving already", reason="busy")
        if any(leg.request == prepare.leg.request and leg.epoch > prepare.leg.epoch for leg in self._known):
            raise Refused("a later epoch has been here", reason="stale_epoch")

    async def _clear_older(self, leg: Leg) -> None:
        """An engine may not know two shells of one request: what is left of an earlier attempt goes first."""
        for other in [known for known in self._known.values() if known.held and known.leg.request == leg.request and known.leg != leg]:
            if other.state is not DestinationState.DROPPED:
                self._drop(other)
            await other.released.wait()

    async def _watch(self, reception: _Reception) -> None:
        await self._arrivals.wait_ended(reception.leg)
        self._befall(reception, DestinationEvent.ENDED)

    async def _grow(self, reception: _Reception, reserve: Reserve) -> Answer:
        prepare = reception.prepared()
        async with asyncio.timeout(self._settings.reserve_timeout_s):
            await self._engine.reserve(reserve.leg, prepare.steps, reserve.room_tokens)
        self._post_receive(reception, prepare.source, reserve)
        return Reserved(reserve.leg, reserve.transfer)

    def _post_receive(self, reception: _Reception, peer: InstanceId, stage: Reserve | Commit) -> None:
        if stage.first_block < stage.end_block:
            receive = self._group.create_task(self._receive(reception, peer, stage))
            reception.receives.add(receive)
            receive.add_done_callback(reception.receives.discard)

    async def _receive(self, reception: _Reception, peer: InstanceId, stage: Reserve | Commit) -> None:
        layout = self._engine.layout()
        expected_bytes = (stage.end_block - stage.first_block) * layout.block_bytes * layout.ranks
        try:
            async with asyncio.timeout(self._settings.copy_timeout_s(expected_bytes)):
                await self._engine.receive_blocks(stage.leg, peer, stage.transfer, stage.first_block, stage.end_block)
        except MigrationError as error:
            reception.failure = error
        except TimeoutError:
            reception.failure = ChannelTimeout(f"transfer {stage.transfer} did not come in time")
        except Exception:
            _logger.exception("%s: unexpected error while receiving", reception.leg)
            reception.failure = ChannelError("unexpected error", reason="internal")
        reception.heard_s = self._clock()

    async def _activate(self, reception: _Reception, commit: Commit) -> Answer:
        prepare = reception.prepared()
        steps = prepare.steps + commit.steps
        self._post_receive(reception, prepare.source, commit)
        async with asyncio.timeout(self._settings.activate_timeout_s):
            await self._engine.adopt(commit.leg, steps, commit.computed_tokens, commit.sampler)
        if reception.receives:
            await asyncio.wait(reception.receives)
        if reception.failure:
            raise reception.failure
        async with asyncio.timeout(self._settings.activate_timeout_s):
            await self._engine.activate(commit.leg, steps, commit.computed_tokens)
        if reception.state is not DestinationState.COMMITTING:
            raise RequestEnded
        # No await from here to OWNER: the request runs, and whoever asks must hear so.
        self._arrivals.extend(commit.leg, commit.steps)
        self._arrivals.finish(commit.leg)
        reception.held = False
        reception.prepare = None
        if reception.watch:
            reception.watch.cancel()
            reception.watch = None  # a cancelled task remembers where it was, and through that all it knew
        return Committed(commit.leg)

    def _drop(self, reception: _Reception) -> None:
        """By our own decision, in whatever state but OWNER."""
        reception.state = DestinationState.DROPPED
        self._release(reception)

    def _release(self, reception: _Reception) -> None:
        self._group.create_task(self._free(reception, asyncio.current_task()))

    async def _free(self, reception: _Reception, releaser: asyncio.Task[object] | None) -> None:
        """Memory is freed once no receive writes into it any more, each of which has a deadline; then the handling stops."""
        for task in (reception.work, reception.watch):
            if task and task is not releaser and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if reception.receives:
            await asyncio.wait(reception.receives)
        for discard in (self._engine.discard, self._arrivals.drop):
            try:
                async with asyncio.timeout(self._settings.discard_timeout_s):
                    await discard(reception.leg)
            except Exception:
                _logger.exception("%s: could not be discarded", reception.leg)
        reception.held = False
        reception.prepare = reception.work = reception.watch = None
        reception.released.set()

    def _say_closing(self, reception: _Reception, message: Message) -> Answer:
        if reception.state is DestinationState.NEW:
            reception.state = DestinationState.DROPPED
        if isinstance(message, Cancel | Query):
            return _standing(reception, message)
        return reception.answers.get(_key(message)) or Refusal(message.leg, "shutting_down")


def _key(message: Message) -> _Key:
    return type(message), message.transfer if isinstance(message, Reserve) else 0


def _event(reception: _Reception, message: Message) -> DestinationEvent:
    if _key(message) in reception.answers:
        return DestinationEvent.REPEATED
    match message:
        case Prepare():
            return DestinationEvent.PREPARE
        case Reserve():
            return DestinationEvent.RESERVE
        case Commit():
            return DestinationEvent.COMMIT
        case Cancel():
            return DestinationEvent.CANCEL
        case Query():
            return DestinationEvent.QUERY


def _refusal(reception: _Reception, message: Message) -> Refusal:
    given = reception.answers.get(_key(message))
    if isinstance(given, Refusal):
        return given
    reason = reception.failure.reason if reception.failure else str(reception.state)
    return Refusal(message.leg, reason, f"the leg is {reception.state} here")


def _standing(reception: _Reception, message: Message) -> Answer:
    """The answer to Cancel and Query."""
    if isinstance(message, Cancel):
        return Cancelled(message.leg, owner=reception.state is DestinationState.OWNER)
    match reception.state:
        case DestinationState.OWNER:
            return StateIs(message.leg, LegState.OWNER)
        case DestinationState.DROPPED:
            return StateIs(message.leg, LegState.DROPPED if reception.released.is_set() or reception.held else LegState.UNKNOWN)
    return StateIs(message.leg, LegState.RESERVED)


def _is_over(reception: _Reception) -> bool:
    return reception.state in (DestinationState.OWNER, DestinationState.DROPPED) and not reception.held
