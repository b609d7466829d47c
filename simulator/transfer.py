"""One migration in virtual time. Every decision is the product's: the source's table, its copy stages, the engine's own reservation.

Copying takes bytes over bandwidth; from the freeze to the destination's first step it takes the downtime.
"""

from collections.abc import Callable
from dataclasses import dataclass

from backend.engine.model import NoRoom
from backend.engine.request import EngineRequest, RequestState
from migration.protocol import SOURCE_START, SOURCE_TERMINAL, SourceAction, SourceEvent, SourceState, source_step
from migration.settings import SessionSettings
from migration.stages import CopyStage, next_stage, room_tokens
from simulator.instance import Instance
from simulator.job import Job
from simulator.loop import Loop


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What moving takes."""

    kv_bytes_per_token: int
    bytes_per_s: float
    downtime_s: float


class Transfer:
    """From one instance to another. `on_end` is called once, with True if the request has moved."""

    def __init__(
        self, job: Job, source: Instance, destination: Instance, loop: Loop, cost: TransferCost, on_end: Callable[["Transfer", bool], None]
    ) -> None:
        self.job = job
        self.source = source
        self.destination = destination
        self._loop = loop
        self._cost = cost
        self._on_end = on_end
        self._settings = SessionSettings()
        self._request = job.engine_request
        self._shell = EngineRequest(
            job.arrival.prompt_tokens, job.arrival.output_tokens, job.engine_request.priority, job.engine_request.tier
        )
        self._state, action = SOURCE_START
        self._stages = 0
        self._copied_blocks = 0
        self._stage: CopyStage | None = None
        self._round = 0
        source.moves_out += 1
        destination.moves_in += 1
        self._run(action)

    @property
    def is_under_way(self) -> bool:
        """It has not come to an end."""
        return self._state not in SOURCE_TERMINAL

    def interrupt(self, event: SourceEvent) -> None:
        """The request ended (ENDED), or has lost its blocks (FAILED). Noticed while copying; when it freezes it is looked at anyway."""
        if self._state is SourceState.SENDING:
            self._feed(event)

    def _feed(self, event: SourceEvent) -> None:
        """Void whatever was waited for, and go on."""
        self._round += 1
        self._state, action = source_step(self._state, event)
        self._run(action)

    def _later(self, delay_s: float, event: Callable[[], SourceEvent]) -> None:
        """Feed what is then the case, unless something else came first."""
        awaited = self._round

        def act() -> None:
            if self._round == awaited:
                self._feed(event())

        self._loop.after(delay_s, act)

    def _run(self, action: SourceAction) -> None:
        event = self._perform(action)
        while event is not None:
            self._state, action = source_step(self._state, event)
            event = self._perform(action)
        if self._state in SOURCE_TERMINAL:
            self.source.moves_out -= 1
            self.destination.moves_in -= 1
            self.source.changed()
            self.destination.changed()
            self._on_end(self, self._state is SourceState.MOVED)

    def _perform(self, action: SourceAction) -> SourceEvent | None:
        """The result, or None if it comes later or never."""
        event = _AT_ONCE.get(action)
        if event is not None:
            return event
        match action:
            case SourceAction.LOOK:
                running = self._request.state is RequestState.RUNNING and self._request.decoding
                return SourceEvent.MOVABLE if running else SourceEvent.UNMOVABLE
            case SourceAction.PREPARE:
                self.destination.model.add_shell(self._shell)
                return SourceEvent.PREPARED
            case SourceAction.PLAN:
                return self._plan()
            case SourceAction.RESERVE | SourceAction.GROW:
                return self._reserve()
            case SourceAction.SEND:
                self._send()
            case SourceAction.FREEZE:
                self._freeze()
            case SourceAction.COMMIT:
                self._later(self._cost.downtime_s, self._commit)
            case SourceAction.THAW:
                self.source.model.thaw(self._request)
                self.source.kick()
                return SourceEvent.THAWED
            case SourceAction.CANCEL:
                self.destination.model.end(self._shell)
                self.destination.kick()
                return SourceEvent.CANCELLED
            case SourceAction.HAND_OVER:
                self._hand_over()
        return None

    def _plan(self) -> SourceEvent:
        request, settings = self._request, self._settings
        stage = next_stage(
            settled_tokens=request.computed_tokens,
            block_tokens=self.source.model.shape.block_tokens,
            copied_blocks=self._copied_blocks,
            stages=self._stages,
            max_stages=settings.max_stages,
            last_stage_blocks=settings.last_stage_blocks,
        )
        self._stage = stage if isinstance(stage, CopyStage) else None
        return SourceEvent.MORE if self._stage else SourceEvent.LAST

    def _reserve(self) -> SourceEvent:
        block_tokens = self.source.model.shape.block_tokens
        room = room_tokens(
            tokens=self._request.tokens, growth_tokens=0, head_room_blocks=self._settings.head_room_blocks, block_tokens=block_tokens
        )
        try:
            self.destination.model.reserve(self._shell, self._request.output_tokens, room)
        except NoRoom:
            return SourceEvent.REFUSED
        self.destination.changed()
        return SourceEvent.RESERVED

    def _send(self) -> None:
        assert self._stage is not None
        blocks = self._stage.end_block - self._stage.first_block
        copied = blocks * self.source.model.shape.block_tokens * self._cost.kv_bytes_per_token
        self._later(copied / self._cost.bytes_per_s, self._sent)

    def _sent(self) -> SourceEvent:
        assert self._stage is not None
        self._copied_blocks = self._stage.end_block
        self._stages += 1
        return SourceEvent.SENT

    def _freeze(self) -> None:
        def at_boundary() -> None:
            self._feed(self._frozen())

        self.source.at_boundary(at_boundary)

    def _frozen(self) -> SourceEvent:
        request = self._request
        if request.state is RequestState.ENDED:
            return SourceEvent.ENDED
        if request.state is not RequestState.RUNNING or not request.decoding:
            # Preempted: nothing was frozen, so there is nothing to thaw.
            return SourceEvent.ENDED
        self.source.model.freeze(request)
        self.source.changed()
        held = len(self._shell.blocks) * self.source.model.shape.block_tokens
        return SourceEvent.FROZEN if request.tokens <= held else SourceEvent.CROWDED

    def _commit(self) -> SourceEvent:
        request = self._request
        self.destination.model.activate(self._shell, request.output_tokens, request.computed_tokens, self._loop.now_s)
        return SourceEvent.COMMITTED

    def _hand_over(self) -> None:
        self._shell.preemptions = self._request.preemptions
        self.destination.jobs[self._shell] = self.job
        self.source.remove(self.job)
        self.job.engine_request = self._shell
        self.job.place, self.job.came_with_tokens = self.destination.id, self._shell.output_tokens
        self.source.count(self.job, -1)
        self.destination.count(self.job, 1)
        self.destination.kick()


_AT_ONCE = {SourceAction.ANNOUNCE: SourceEvent.ANNOUNCED}
