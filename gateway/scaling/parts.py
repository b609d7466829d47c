"""What scaling is made of in one gateway."""

import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from backend.registry.store import InstanceStore
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.line import Line
from gateway.scale_metrics import ScaleMetrics
from gateway.scaling.autoscaler import LEASE as AUTOSCALER_LEASE
from gateway.scaling.autoscaler import Autoscaler, Pacing
from gateway.scaling.hand import Hand, Limits
from gateway.scaling.http_launcher import HttpLauncher
from gateway.scaling.llumlets import Llumlets
from gateway.scaling.news import News
from gateway.scaling.operations import Operations
from gateway.scaling.tenure import Tenure
from gateway.scaling.worker import LEASE, Worker
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream


@dataclass(frozen=True, slots=True)
class ScalingParts:
    """`launcher` and `worker` None: no launcher is set, instances come and go by other hands. `autoscaler` None: it is off."""

    operations: Operations
    llumlets: Llumlets
    launcher: HttpLauncher | None
    worker: Worker | None
    autoscaler: Autoscaler | None

    def keepers(self) -> Sequence[Coroutine[None, None, None]]:
        """What is to run as long as the app does."""
        return [part.keep() for part in (self.worker, self.autoscaler) if part is not None]


def build_scaling(
    settings: GatewaySettings,
    store: InstanceStore,
    upstream: Upstream,
    ledger: Ledger,
    line: Line,
    events: EventFeed,
    metrics: ScaleMetrics,
    clock: Callable[[], float],
) -> ScalingParts:
    """Wire the parts."""
    operations = Operations(
        store.records,
        keep_s=settings.operation_ttl_s,
        store_timeout_s=settings.store_timeout_s,
        now=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
        new_name=lambda prefix: f"{prefix}-{secrets.token_hex(4)}",
    )
    llumlets = Llumlets(upstream, settings.admin_timeout_s)
    if not settings.launcher_url:
        return ScalingParts(operations, llumlets, None, None, None)
    token = settings.launcher_token.get_secret_value() if settings.launcher_token else None
    launcher = HttpLauncher(upstream, settings.launcher_url, token, settings.launcher_timeout_s)
    limits = Limits(
        start_s=settings.scale_start_timeout_s,
        drain_s=settings.scale_drain_timeout_s,
        retry_s=settings.scale_retry_s,
        max_retry_s=settings.scale_max_retry_s,
        attempts=settings.scale_attempts,
    )
    hand = Hand(launcher, llumlets, limits, clock)
    tenure = _tenure(settings, store, LEASE)
    worker = Worker(operations, tenure, hand, launcher, ledger, News(events, metrics), settings.operations_interval_s)
    if settings.autoscale is None:
        return ScalingParts(operations, llumlets, launcher, worker, None)
    autoscaler = Autoscaler(
        settings.autoscale,
        operations,
        launcher,
        ledger,
        _tenure(settings, store, AUTOSCALER_LEASE),
        Pacing(settings.autoscale_interval_s, settings.scale_max_retry_s),
        line_tokens=line.waiting_tokens,
        clock=clock,
    )
    return ScalingParts(operations, llumlets, launcher, worker, autoscaler)


def _tenure(settings: GatewaySettings, store: InstanceStore, name: str) -> Tenure:
    return Tenure(store.leases, name, settings.gateway_id, ttl_s=settings.lease_ttl_s, store_timeout_s=settings.store_timeout_s)
