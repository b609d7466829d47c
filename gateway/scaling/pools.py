"""PURE. The cluster as a scaling rule sees it: for each model a pool of its own, with operations under way counted as if they were done.

- An instance that is being started counts as starting from its order on, before it reports anything.
- One that is to be drained counts as draining from its order on.
- One that was told to stop, or that an operator drains by hand, counts no more.
"""

from collections.abc import Mapping
from dataclasses import replace

from backend.registry.instance import InstanceState, LoadReport
from gateway.policy.view import ClusterView, InstanceView, ViewState
from gateway.scaling.book import Book
from gateway.scaling.operation import OperationKind, Phase
from migration.leg import InstanceId

_COMING = frozenset({Phase.PENDING, Phase.STARTING, Phase.CLEARING})
_GOING = frozenset({Phase.PENDING, Phase.DRAINING})


def pools_of(cluster: ClusterView, book: Book) -> Mapping[str | None, ClusterView]:
    """The pools by model; the one of None where the launcher's default is not known yet."""
    pools: dict[str | None, list[InstanceView]] = {}
    phases = {
        subject.instance: (operation, subject.phase) for operation in book.operations for subject in operation.subjects if subject.is_active
    }
    for view in cluster.instances:
        operation, phase = phases.get(view.id, (None, None))
        if operation is None:
            seen = view if view.state is not ViewState.DRAINING else None
        elif operation.kind is OperationKind.SCALE_OUT:
            seen = view if phase in _COMING else None
        elif phase in _GOING:
            seen = replace(view, state=ViewState.DRAINING)
        else:
            seen = replace(view, state=ViewState.READY) if phase is Phase.RETURNING else None
        if seen is not None:
            pools.setdefault(_model(view), []).append(seen)
    reporting = {view.id for view in cluster.instances}
    for instance, (operation, phase) in phases.items():
        if operation.kind is OperationKind.SCALE_OUT and phase in _COMING and instance not in reporting:
            pools.setdefault(operation.model, []).append(_coming(instance, operation.model))
    return {model: ClusterView(tuple(sorted(views, key=lambda view: view.id))) for model, views in pools.items()}


def _model(view: InstanceView) -> str | None:
    return view.report.models[0] if view.report.models else None


def _coming(instance: InstanceId, model: str | None) -> InstanceView:
    """An instance that has nothing yet."""
    report = LoadReport(
        instance=instance,
        incarnation="",
        sequence=0,
        url="",
        state=InstanceState.STARTING,
        models=(model,) if model else (),
        engine="",
        capacity_tokens=0,
        free_tokens=0,
        block_tokens=1,
        running=0,
        waiting=0,
        waiting_tokens=0,
        head_tokens=0,
        head_tier="",
        oldest_waiting_s=0.0,
        tiers=(),
        preemptions=0,
        migrations_in=0,
        migrations_out=0,
        max_batch=0,
        max_model_tokens=0,
    )
    return InstanceView(report, ViewState.STARTING, 0.0, 0, 0)
