"""What the source does in one attempt: performs the actions of SOURCE_TABLE. It decides nothing: it says what happened, or raises."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from migration.departure import Announcement, Departure, Kept, Lost, Moved, Moving
from migration.errors import LinkError, MigrationError, PeerGone, ProtocolError, Refused, Unmovable
from migration.leg import Leg
from migration.messages import (
    Answer,
    Cancel,
    Cancelled,
    Commit,
    Committed,
    KVLayout,
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
from migration.pair import Pair
from migration.plan import MigrationMode
from migration.ports import Frozen, Link, Phase, Progress, SourceEngine
from migration.protocol import SourceAction, SourceEvent
from migration.settings import SessionSettings
from migration.stages import CopyStage, last_range, next_stage, room_tokens

_logger = logging.getLogger(__name__)


class Source:
    """The state of one attempt at the source, and its actions. `fresh` asks for a new channel instead of a cached one."""

    def __init__(
        self,
        departure: Departure,
        *,
        engine: SourceEngine,
        link: Link,
        announce: Callable[[Announcement], Awaitable[None]],
        settings: SessionSettings,
        clock: Callable[[], float],
        pair: Pair,
        fresh: bool,
    ) -> None:
        self._departure = departure
        self._leg = departure.leg
        self.new_leg: Leg = departure.new_leg()
        self._engine = engine
        self._link = link
        self._announce = announce
        self._settings = settings
        self._clock = clock
        self._pair = pair
        self._fresh = fresh
        self._holds_order = False
        self._layout: KVLayout = engine.layout()
        self._progress = Progress(Phase.WAITING, 0, 0, 0)
        self._copies = False
        self._prepared_steps = 0
        self._planned_tokens = 0
        self._room_tokens = 0
        self._copied_blocks = 0
        self._stage = CopyStage(0, 0)
        self._transfer = 0
        self._owed_transfer: int | None = None
        """Announced to the destination, which waits for it now, and not begun."""
        self._frozen: Frozen | None = None
        self._frozen_at_s: float | None = None
        self._announced = False
        self._resolve_until_s: float | None = None
        self.stages = 0
        self.bytes = 0
        self.frozen_ms = 0.0
        self._actions: dict[SourceAction, Callable[[], Awaitable[SourceEvent]]] = {
            SourceAction.LOOK: self._look,
            SourceAction.PREPARE: self._prepare,
            SourceAction.ANNOUNCE: self._announce_moving,
            SourceAction.PLAN: self._plan,
            SourceAction.RESERVE: self._reserve,
            SourceAction.SEND: self._send,
            SourceAction.FREEZE: self._freeze,
            SourceAction.GROW: self._grow,
            SourceAction.COMMIT: self._commit,
            SourceAction.ASK: self._ask_state,
            SourceAction.REVOKE: self._revoke,
            SourceAction.THAW: self._thaw,
            SourceAction.CANCEL: self._cancel,
        }

    async def perform(self, action: SourceAction) -> SourceEvent:
        """Raises MigrationError, TimeoutError, and whatever a broken engine raises."""
        return await self._actions[action]()

    async def hand_over(self) -> None:
        """The destination owns the request."""
        self._note_frozen_time()
        await self._tell(Moved(self.new_leg.epoch))

    async def give_up(self, reason: str) -> None:
        """Nobody knows who owns the request: this side does not."""
        self._note_frozen_time()
        await self._tell(Lost(self.new_leg.epoch, reason))

    def release_order(self) -> None:
        """Let the next transfer to this peer begin. Idempotent."""
        if self._holds_order:
            self._holds_order = False
            self._pair.order.release()

    async def _look(self) -> SourceEvent:
        self._engine.check_movable(self._leg)
        self._progress = await self._look_once()
        if self._departure.plan.only_waiting and self._progress.phase is not Phase.WAITING:
            raise Unmovable(reason="started")
        if self._progress.phase is Phase.PREFILL:
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                await self._engine.wait_first_token(self._leg)
            self._progress = await self._look_once()
        self._copies = self._progress.phase is Phase.DECODE and self._departure.plan.mode is not MigrationMode.RECOMPUTE
        return SourceEvent.MOVABLE

    async def _look_once(self) -> Progress:
        async with asyncio.timeout(self._settings.message_timeout_s):
            return await self._engine.look(self._leg)

    async def _prepare(self) -> SourceEvent:
        departure = self._departure
        channel = None
        if self._copies:
            async with asyncio.timeout(self._settings.prepare_timeout_s):
                channel = await self._engine.offer_channel(departure.plan.destination.instance, fresh=self._fresh)
        steps = self._engine.steps(self._leg)
        self._prepared_steps = len(steps)
        self._planned_tokens = self._progress.prompt_tokens + len(steps)
        self._room_tokens = self._room(self._planned_tokens, growth_tokens=0) if self._copies else 0
        prepare = Prepare(
            leg=self.new_leg,
            source=departure.source,
            mode=departure.plan.mode,
            http=departure.http,
            created=departure.created(),
            steps=steps,
            prompt_tokens=self._progress.prompt_tokens,
            room_tokens=self._room_tokens,
            layout=self._layout,
            channel=channel,
            tier=departure.tier,
            prefill=departure.prefill(),
        )
        answer = await self._ask(prepare, self._settings.prepare_timeout_s)
        if not isinstance(answer, Prepared):
            raise _unexpected(prepare, answer)
        self._copied_blocks = answer.cached_tokens // self._layout.block_tokens
        return SourceEvent.PREPARED

    async def _announce_moving(self) -> SourceEvent:
        destination = self._departure.plan.destination
        self._announced = True
        async with asyncio.timeout(self._settings.message_timeout_s):
            await self._announce(Moving(self.new_leg.epoch, destination.instance, destination.url))
        return SourceEvent.ANNOUNCED

    async def _plan(self) -> SourceEvent:
        if not self._copies or self._departure.plan.mode is MigrationMode.STOP_COPY:
            return SourceEvent.LAST
        self._progress = await self._look_once()
        if self._progress.phase is not Phase.DECODE:
            return SourceEvent.LAST  # preempted: its blocks here are gone, it will be computed again wherever it runs
        stage = next_stage(
            settled_tokens=self._progress.settled_tokens,
            block_tokens=self._layout.block_tokens,
            copied_blocks=self._copied_blocks,
            stages=self.stages,
            max_stages=self._settings.max_stages,
            last_stage_blocks=self._settings.last_stage_blocks,
        )
        if not isinstance(stage, CopyStage):
            return SourceEvent.LAST
        self._stage = stage
        return SourceEvent.MORE

    async def _reserve(self) -> SourceEvent:
        await self._take_order()
        tokens = self._progress.prompt_tokens + self._progress.output_tokens
        wanted_tokens = self._room(tokens, growth_tokens=max(0, tokens - self._planned_tokens))
        self._planned_tokens = tokens
        await self._ask_room(max(wanted_tokens, self._room_tokens), self._stage)
        return SourceEvent.RESERVED

    async def _grow(self) -> SourceEvent:
        frozen = self._out_of_batch()
        tokens = frozen.prompt_tokens + len(frozen.steps)
        await self._ask_room(self._room(tokens, growth_tokens=0), CopyStage(self._copied_blocks, self._copied_blocks))
        return SourceEvent.RESERVED

    async def _ask_room(self, tokens: int, stage: CopyStage) -> None:
        self._transfer = self._pair.next_transfer()
        reserve = Reserve(self.new_leg, tokens, self._transfer, stage.first_block, stage.end_block)
        if stage.first_block < stage.end_block:
            self._owed_transfer = self._transfer
        answer = await self._ask(reserve, self._settings.message_timeout_s)
        if not isinstance(answer, Reserved):
            raise _unexpected(reserve, answer)
        self._room_tokens = tokens

    async def _send(self) -> SourceEvent:
        self.bytes += await self._send_blocks(self._transfer, self._stage.first_block, self._stage.end_block)
        self.release_order()
        self.stages += 1
        self._copied_blocks = self._stage.end_block
        return SourceEvent.SENT

    async def _send_blocks(self, transfer: int, first_block: int, end_block: int) -> int:
        self._owed_transfer = None
        async with asyncio.timeout(self._copy_timeout_s(end_block - first_block)):
            peer = self._departure.plan.destination.instance
            return await self._engine.send_blocks(self._leg, peer, transfer, first_block, end_block)

    async def _freeze(self) -> SourceEvent:
        if self._copies:
            await self._take_order()  # before the freeze: others' transfers must not count as downtime
        async with asyncio.timeout(self._settings.freeze_timeout_s):
            frozen = await self._engine.freeze(self._leg)
        self._frozen = frozen
        self._frozen_at_s = self._clock()
        crowded = self._copies and frozen.prompt_tokens + len(frozen.steps) > self._room_tokens
        return SourceEvent.CROWDED if crowded else SourceEvent.FROZEN

    async def _commit(self) -> SourceEvent:
        frozen = self._out_of_batch()
        computed_tokens = frozen.computed_tokens if self._copies else 0
        first_block, end_block = last_range(
            computed_tokens=computed_tokens, block_tokens=self._layout.block_tokens, copied_blocks=self._copied_blocks
        )
        commit = Commit(
            leg=self.new_leg,
            steps=frozen.steps[self._prepared_steps :],
            computed_tokens=computed_tokens,
            transfer=self._pair.next_transfer(),
            first_block=first_block,
            end_block=end_block,
            sampler=frozen.sampler,
        )
        answer = await self._ask_and_send(commit)
        if not isinstance(answer, Committed):
            raise _unexpected(commit, answer)
        return SourceEvent.COMMITTED

    async def _ask_and_send(self, commit: Commit) -> Answer:
        blocks = commit.end_block - commit.first_block
        answer: Answer | MigrationError
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_last(commit)) if blocks else None
            self._owed_transfer = commit.transfer if blocks else None
            try:
                answer = await self._ask(commit, self._settings.message_timeout_s + self._copy_timeout_s(blocks))
            except MigrationError as error:
                answer = error
                if sending:
                    sending.cancel()  # nobody receives
        if isinstance(answer, MigrationError):
            raise answer
        return answer

    async def _send_last(self, commit: Commit) -> None:
        """A failure is the destination's to report: it was told that nothing comes, and refuses the Commit."""
        try:
            self.bytes += await self._send_blocks(commit.transfer, commit.first_block, commit.end_block)
            self.stages += 1
        except (MigrationError, TimeoutError) as error:
            _logger.warning("%s: last blocks not sent: %r", self.new_leg, error)

    async def _ask_state(self) -> SourceEvent:
        now_s = self._clock()
        if self._resolve_until_s is None:
            self._resolve_until_s = now_s + self._settings.resolve_timeout_s
        else:
            if now_s >= self._resolve_until_s:
                return SourceEvent.UNRESOLVED
            await asyncio.sleep(self._settings.resolve_pause_s)
        answer = await self._ask(Query(self.new_leg), self._settings.message_timeout_s)
        if not isinstance(answer, StateIs):
            raise _unexpected(Query(self.new_leg), answer)
        match answer.state:
            case LegState.OWNER:
                return SourceEvent.OWNER
            case LegState.RESERVED:
                return SourceEvent.HELD
            case LegState.UNKNOWN | LegState.DROPPED:
                return SourceEvent.FREE

    async def _revoke(self) -> SourceEvent:
        answer = await self._ask(Cancel(self.new_leg, "revoked"), self._settings.message_timeout_s)
        if not isinstance(answer, Cancelled):
            raise _unexpected(Cancel(self.new_leg), answer)
        return SourceEvent.TAKEN if answer.owner else SourceEvent.CANCELLED

    async def _thaw(self) -> SourceEvent:
        async with asyncio.timeout(self._settings.freeze_timeout_s):
            await self._engine.thaw(self._leg)
        self._note_frozen_time()
        return SourceEvent.THAWED

    async def _cancel(self) -> SourceEvent:
        if self._announced:
            await self._tell(Kept(self.new_leg.epoch))
        await self._call_off()
        self.release_order()
        for attempt in range(1, self._settings.cancel_tries + 1):
            try:
                return await self._revoke()
            except PeerGone:
                return SourceEvent.GONE
            except (LinkError, ProtocolError, Refused) as error:
                _logger.info("%s: cancel, attempt %d: %r", self.new_leg, attempt, error)
        return SourceEvent.SILENT

    async def _call_off(self) -> None:
        """Nobody shall wait for blocks that will not come."""
        if self._owed_transfer is None:
            return
        try:
            async with asyncio.timeout(self._settings.message_timeout_s):
                await self._send_blocks(self._owed_transfer, 0, 0)
        except (MigrationError, TimeoutError) as error:
            _logger.info("%s: calling off: %r", self.new_leg, error)

    async def _take_order(self) -> None:
        if not self._holds_order:
            async with asyncio.timeout(self._settings.pair_timeout_s):
                await self._pair.order.acquire()
            self._holds_order = True

    async def _tell(self, news: Announcement) -> None:
        """The client's side may be gone by now; that changes nothing here."""
        try:
            async with asyncio.timeout(self._settings.message_timeout_s):
                await self._announce(news)
        except Exception:
            _logger.exception("%s: could not announce %s", self.new_leg, news)

    async def _ask(self, message: Message, timeout_s: float) -> Answer:
        """Raises Refused, LinkError, PeerGone."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._link.ask(message, timeout_s)
        except TimeoutError as error:
            raise LinkError(f"no answer to {type(message).__name__} in {timeout_s:.1f} s") from error
        if isinstance(answer, Refusal):
            self._owed_transfer = None
            raise Refused(answer.detail, reason=answer.reason)
        return answer

    def _room(self, tokens: int, *, growth_tokens: int) -> int:
        return room_tokens(
            tokens=tokens,
            growth_tokens=growth_tokens,
            head_room_blocks=self._settings.head_room_blocks,
            block_tokens=self._layout.block_tokens,
        )

    def _copy_timeout_s(self, blocks: int) -> float:
        return self._settings.copy_timeout_s(blocks * self._layout.block_bytes * self._layout.ranks)

    def _out_of_batch(self) -> Frozen:
        if self._frozen is None:
            raise ProtocolError("not frozen")
        return self._frozen

    def _note_frozen_time(self) -> None:
        if self._frozen_at_s is not None:
            self.frozen_ms = (self._clock() - self._frozen_at_s) * 1000
            self._frozen_at_s = None


def _unexpected(message: Message, answer: Answer) -> ProtocolError:
    return ProtocolError(f"{type(answer).__name__} is no answer to {type(message).__name__}")
