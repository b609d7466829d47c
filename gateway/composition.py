"""What one gateway process is made of. Built once by the app's lifespan, and handed to each request by it."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from gateway.access.gate import Gate
from gateway.decisions import DecisionLog
from gateway.dispatcher import Dispatcher
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.passive.watcher import PassiveWatch
from gateway.policy.config import Policy
from gateway.request_ids import RequestIds
from gateway.request_log import RequestLog
from gateway.scaling.parts import ScalingParts
from gateway.settings import GatewaySettings
from gateway.streams import Streams
from gateway.token_memory import TokenMemory
from gateway.upstream import Upstream
from gateway.watch import InstanceWatch


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts, wired. `started_s` is the wall-clock second the gateway started; `clock` is monotonic, in seconds."""

    settings: GatewaySettings
    gate: Gate
    policy: Policy
    ledger: Ledger
    line: Line
    dispatcher: Dispatcher
    upstream: Upstream
    metrics: Metrics
    request_log: RequestLog
    request_ids: RequestIds
    events: EventFeed
    decisions: DecisionLog
    watch: InstanceWatch
    scaling: ScalingParts
    passive: PassiveWatch
    token_memory: TokenMemory
    streams: Streams
    clock: Callable[[], float]
    started_s: int


def composition_of(scope: Scope) -> Composition:
    """The composition that serves this request."""
    parts = scope["state"]["composition"]
    assert isinstance(parts, Composition)
    return parts
