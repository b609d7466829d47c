"""Two engines, a link and arrivals, all in memory and scripted: every wait is a gate that the test opens."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from migration.departure import Announcement, Departure
from migration.errors import ChannelError, LinkError, PeerGone, Refused, RequestEnded, Unmovable
from migration.leg import InstanceId, Leg, RequestId
from migration.messages import Answer, ChannelOffer, HttpRequest, KVLayout, Message, Prepare, TokenStep
from migration.pair import Pair
from migration.plan import Destination, MigrationMode, MigrationOutcome, MigrationPlan
from migration.ports import Frozen, Phase, Progress, SourceEngine
from migration.reception import Receptions
from migration.session import run_migration
from migration.settings import ReceptionSettings, SessionSettings

BLOCK_TOKENS = 4
BLOCK_BYTES = 100
LAYOUT = KVLayout(
    model="m", dtype="bf16", block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, layers=2, ranks=1, shape="2x4", version="scripted 1"
)
REQUEST = RequestId("r")
B = InstanceId("b")
HTTP = HttpRequest("/v1/completions", (("content-type", "application/json"),), b"{}")
PROMPT_TOKENS = 10
SETTINGS = SessionSettings(message_timeout_s=2, resolve_pause_s=0, resolve_timeout_s=10, freeze_timeout_s=2, prepare_timeout_s=2)
RECEPTION_SETTINGS = ReceptionSettings()


class Clock:
    """Stands still unless told; `step_s` passes at each look."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


async def until(condition: Callable[[], bool]) -> None:
    """Let everybody run until it holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@dataclass
class Wire:
    """The KV bytes under way: (source, transfer number) -> blocks, or the error that the receiver shall see."""

    transfers: dict[tuple[InstanceId, int], "asyncio.Future[list[str] | ChannelError]"] = field(default_factory=dict)

    def transfer(self, source: InstanceId, number: int) -> "asyncio.Future[list[str] | ChannelError]":
        return self.transfers.setdefault((source, number), asyncio.get_running_loop().create_future())

    def put(self, source: InstanceId, number: int, blocks: list[str] | ChannelError) -> None:
        future = self.transfer(source, number)
        if not future.done():
            future.set_result(blocks)


@dataclass
class Running:
    """A request in an engine. Token n is n + 1; the KV of a block is the text of its tokens."""

    steps: list[TokenStep] = field(default_factory=list)
    phase: Phase = Phase.DECODE
    frozen: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    blocks: dict[int, str] = field(default_factory=dict)
    room_tokens: int = 0
    owned: bool = True
    adopted: tuple[tuple[int, ...], int, tuple[bytes, ...]] | None = None

    def decode(self, tokens: int = 1) -> None:
        assert not self.frozen
        assert self.owned
        for _ in range(tokens):
            self.steps.append(TokenStep(len(self.steps) + 1))

    @property
    def computed_tokens(self) -> int:
        return PROMPT_TOKENS + len(self.steps) - 1 if self.steps else 0


def block_text(block: int, computed_tokens: int) -> str:
    return ",".join(str(token) for token in range(block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, computed_tokens)))


class Gates:
    """Named points to stop at. A test closes one, waits until someone stands there, and opens it again."""

    def __init__(self) -> None:
        self._closed: dict[str, asyncio.Event] = {}
        self.reached: list[str] = []
        self.hooks: dict[str, Callable[[], None]] = {}

    def close(self, name: str) -> None:
        self._closed[name] = asyncio.Event()

    def open(self, name: str) -> None:
        self._closed.pop(name).set()

    async def wait_reached(self, name: str) -> None:
        await until(lambda: name in self.reached)

    async def through(self, name: str) -> None:
        self.reached.append(name)
        hook = self.hooks.pop(name, None)
        if hook:
            hook()
        gate = self._closed.get(name)
        if gate:
            await gate.wait()


class ScriptedEngine:
    """Both engine ports and Arrivals in one: the whole of an instance."""

    def __init__(self, name: str, wire: Wire) -> None:
        self.instance = InstanceId(name)
        self.wire = wire
        self.gates = Gates()
        self.requests: dict[Leg, Running] = {}
        self.layout_here = LAYOUT
        self.unmovable: str | None = None
        self.cached_tokens = 0
        self.capacity_tokens = 10_000
        self.fail: dict[str, Exception] = {}
        self.channels: list[tuple[InstanceId, bool]] = []
        self.decode_while: dict[str, int] = {}
        self.activated: list[tuple[Leg, tuple[int, ...], int, tuple[bytes, ...]]] = []
        self.replayed: dict[Leg, list[int]] = {}
        self.finished: list[Leg] = []
        self.discarded: list[Leg] = []

    def start(self, tokens: int, phase: Phase = Phase.DECODE, leg: Leg | None = None) -> Leg:
        leg = leg or Leg(REQUEST, 0)
        running = self.requests[leg] = Running(phase=phase)
        running.decode(tokens)
        return leg

    def layout(self) -> KVLayout:
        return self.layout_here

    def _here(self, leg: Leg) -> Running:
        running = self.requests.get(leg)
        if running is None or running.ended.is_set():
            raise RequestEnded
        return running

    async def _at(self, name: str, leg: Leg | None = None) -> None:
        await self.gates.through(name)
        if leg in self.requests and not self.requests[leg].frozen and self.requests[leg].owned:
            self.requests[leg].decode(self.decode_while.get(name, 0))
        if name in self.fail:
            raise self.fail.pop(name)

    # --- the source's port

    def check_movable(self, leg: Leg) -> None:
        self._here(leg)
        if self.unmovable:
            raise Unmovable(reason=self.unmovable)

    async def look(self, leg: Leg) -> Progress:
        await self._at("look", leg)
        running = self._here(leg)
        return Progress(running.phase, PROMPT_TOKENS, len(running.steps), running.computed_tokens)

    def steps(self, leg: Leg) -> tuple[TokenStep, ...]:
        return tuple(self._here(leg).steps)

    async def wait_first_token(self, leg: Leg) -> None:
        await self._at("wait_first_token", leg)
        running = self._here(leg)
        running.phase = Phase.DECODE
        running.decode()

    async def offer_channel(self, peer: InstanceId, *, fresh: bool) -> ChannelOffer:
        await self._at("offer_channel")
        self.channels.append((peer, fresh))
        return ChannelOffer("memory", "fresh" if fresh else "cached", ("here",))

    async def send_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> int:
        if first_block == end_block:
            self.wire.put(self.instance, transfer, ChannelError(reason="called_off"))
            return 0
        try:
            computed_tokens = self._here(leg).computed_tokens
            await self._at("send_blocks", leg)
            self.wire.put(self.instance, transfer, [block_text(block, computed_tokens) for block in range(first_block, end_block)])
        except BaseException:
            self.wire.put(self.instance, transfer, ChannelError(reason="aborted"))
            raise
        return (end_block - first_block) * BLOCK_BYTES

    async def freeze(self, leg: Leg) -> Frozen:
        await self._at("freeze", leg)
        running = self._here(leg)
        running.frozen = True
        computed_tokens = 0 if running.phase is Phase.WAITING else running.computed_tokens
        return Frozen(tuple(running.steps), PROMPT_TOKENS, computed_tokens, (b"sampler",))

    async def thaw(self, leg: Leg) -> None:
        await self._at("thaw", leg)
        if leg in self.requests:
            self.requests[leg].frozen = False

    async def wait_ended(self, leg: Leg) -> None:
        running = self.requests.get(leg)
        if running:
            await running.ended.wait()

    # --- the destination's port

    async def accept_channel(self, peer: InstanceId, offer: ChannelOffer) -> None:
        await self._at("accept_channel")

    async def reserve(self, leg: Leg, steps: Sequence[TokenStep], room_tokens: int) -> int:
        await self._at("reserve", leg)
        if room_tokens > self.capacity_tokens:
            raise Refused(reason="no_memory")
        self._here(leg).room_tokens = room_tokens
        return self.cached_tokens

    async def receive_blocks(self, leg: Leg, peer: InstanceId, transfer: int, first_block: int, end_block: int) -> None:
        await self._at("receive_blocks", leg)
        blocks = await self.wire.transfer(peer, transfer)
        if isinstance(blocks, ChannelError):
            raise blocks
        shell = self.requests[leg]
        assert not shell.owned, "KV written into a running request"
        assert end_block * BLOCK_TOKENS <= shell.room_tokens + BLOCK_TOKENS - 1, "KV written outside the reservation"
        shell.blocks.update(zip(range(first_block, end_block), blocks, strict=True))

    async def adopt(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int, sampler: Sequence[bytes]) -> None:
        await self._at("adopt", leg)
        shell = self._here(leg)
        assert not shell.owned, "adopted after the activation"
        shell.adopted = (tuple(step.token for step in steps), computed_tokens, tuple(sampler))

    async def activate(self, leg: Leg, steps: Sequence[TokenStep], computed_tokens: int) -> None:
        await self._at("activate", leg)
        shell = self._here(leg)
        assert shell.adopted is not None, "activated before it was adopted"
        assert shell.adopted[:2] == (tuple(step.token for step in steps), computed_tokens)
        shell.steps = list(steps)
        shell.owned = True
        if computed_tokens:
            assert len(steps) + PROMPT_TOKENS <= shell.room_tokens
            first = self.cached_tokens // BLOCK_TOKENS
            wanted = range(first, -(-computed_tokens // BLOCK_TOKENS))
            assert shell.blocks == {block: block_text(block, computed_tokens) for block in wanted}
        self.activated.append((leg, *shell.adopted))

    async def discard(self, leg: Leg) -> None:
        await self._at("discard", leg)
        self.discarded.append(leg)

    # --- arrivals

    async def admit(self, prepare: Prepare) -> None:
        self.requests[prepare.leg] = Running(owned=False)
        self.replayed[prepare.leg] = [step.token for step in prepare.steps]
        await self._at("admit", prepare.leg)
        self._here(prepare.leg)

    def extend(self, leg: Leg, steps: Sequence[TokenStep]) -> None:
        self.replayed[leg].extend(step.token for step in steps)

    def finish(self, leg: Leg) -> None:
        self.finished.append(leg)

    async def drop(self, leg: Leg) -> None:
        await self._at("drop", leg)
        running = self.requests.pop(leg, None)
        if running:
            running.ended.set()


class ScriptedLink:
    """To one peer, directly into its Receptions. `plan` says what becomes of the n-th message of a kind."""

    def __init__(self, receptions: Receptions) -> None:
        self.receptions = receptions
        self.said: list[str] = []
        self.faults: dict[str, list[str]] = {}
        self.dead = False

    async def ask(self, message: Message, timeout_s: float) -> Answer:
        kind = type(message).__name__.lower()
        self.said.append(kind)
        faults = self.faults.get(kind)
        fault = faults.pop(0) if faults else ""
        if self.dead or fault == "dead":
            self.dead = True
            raise PeerGone
        if fault == "lost":
            raise LinkError
        answer = await self.receptions.answer(message)
        if fault == "twice":
            assert await self.receptions.answer(message) == answer
        if fault == "unanswered":
            raise LinkError
        if fault == "dies":
            self.dead = True
            raise LinkError
        return answer


@dataclass
class Migration:
    """A source, and what it announces."""

    source: ScriptedEngine
    link: ScriptedLink
    leg: Leg
    to: InstanceId = B
    mode: MigrationMode = MigrationMode.LIVE
    clock: Clock = field(default_factory=Clock)
    settings: SessionSettings = SETTINGS
    pair: Pair = field(default_factory=Pair)
    announced: list[Announcement] = field(default_factory=list)
    epoch: int | None = None

    def _new_leg(self) -> Leg:
        self.epoch = (self.leg.epoch if self.epoch is None else self.epoch) + 1
        return Leg(self.leg.request, self.epoch)

    async def _announce(self, news: Announcement) -> None:
        await self.source.gates.through(f"announce_{type(news).__name__.lower()}")
        self.announced.append(news)

    def run(self) -> Awaitable[MigrationOutcome]:
        engine: SourceEngine = self.source
        departure = Departure(
            plan=MigrationPlan(self.leg.request, Destination(self.to, f"http://{self.to}"), self.mode),
            source=self.source.instance,
            leg=self.leg,
            new_leg=self._new_leg,
            http=HTTP,
            created=lambda: 7,
        )
        return run_migration(
            departure,
            engine=engine,
            link=self.link,
            announce=self._announce,
            settings=self.settings,
            clock=self.clock,
            pair=self.pair,
        )

    @property
    def names(self) -> list[str]:
        return [type(news).__name__.lower() for news in self.announced]
