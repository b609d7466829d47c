"""What runs where, asked of the instances themselves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from backend.registry.store import StoreError
from gateway.composition import Composition
from gateway.errors import RequestNotFound, UpstreamFailed
from gateway.policy.view import InstanceView
from migration.leg import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request as its instance tells it."""

    request: RequestId
    view: InstanceView
    fields: dict[str, object]


async def ask_all(parts: Composition, views: Sequence[InstanceView]) -> tuple[list[RunningRequest], list[InstanceId]]:
    """What runs on these instances, and which of them did not answer in time. Passive ones cannot tell and are not asked."""
    views = [view for view in views if view.can_move]
    async with asyncio.TaskGroup() as tasks:
        asked = [(view, tasks.create_task(_ask_one(parts, view))) for view in views]
    answers = [(view, task.result()) for view, task in asked]
    return [row for _, rows in answers if rows is not None for row in rows], [view.id for view, rows in answers if rows is None]


async def _ask_one(parts: Composition, view: InstanceView) -> list[RunningRequest] | None:
    """None if the instance does not answer."""
    try:
        raw = await parts.upstream.get_json(f"{view.report.url}/midstream/requests", parts.settings.admin_timeout_s)
    except UpstreamFailed:
        return None
    rows = raw.get("requests") if isinstance(raw, dict) else None
    if not isinstance(rows, list):
        return None
    return [
        RunningRequest(RequestId(str(row["request"])), view, {key: value for key, value in row.items() if key != "request"})
        for row in rows
        if isinstance(row, dict) and "request" in row
    ]


async def locate(parts: Composition, request: RequestId) -> RunningRequest:
    """Where the request runs: where its claim is, or else wherever it is found. Raises RequestNotFound."""
    cluster = await parts.ledger.view(0.0)
    try:
        claimed_at = next((claim.instance for claim in await parts.ledger.claims() if claim.request == request), None)
    except StoreError:
        claimed_at = None
    likely = [view for view in cluster.instances if view.id == claimed_at]
    others = [view for view in cluster.instances if view.id != claimed_at]
    for views in (likely, others):
        running, _ = await ask_all(parts, views)
        found = [row for row in running if row.request == request]
        if found:
            return max(found, key=lambda row: epoch if isinstance(epoch := row.fields.get("epoch"), int) else 0)
    raise RequestNotFound(f"No instance runs a request '{request}'.", param="request")
