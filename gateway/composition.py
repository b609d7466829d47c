"""What one gateway process is made of. Built once by the app's lifespan, and handed to each request by it."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from gateway.dispatcher import Dispatcher
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.policy.config import Policy
from gateway.request_ids import RequestIds
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from gateway.watch import InstanceWatch


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts, wired. `started_s` is the wall-clock second the gateway started; `clock` is monotonic, in seconds."""

    settings: GatewaySettings
    policy: Policy
    ledger: Ledger
    line: Line
    dispatcher: Dispatcher
    upstream: Upstream
    metrics: Metrics
    request_ids: RequestIds
    events: EventFeed
    watch: InstanceWatch
    clock: Callable[[], float]
    started_s: int


def composition_of(scope: Scope) -> Composition:
    """The composition that serves this request."""
    parts = scope["state"]["composition"]
    assert isinstance(parts, Composition)
    return parts
