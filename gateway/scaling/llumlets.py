"""Draining as a gateway orders it: the instance itself moves its requests away (docs/scaling.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import UpstreamBroken, UpstreamFailed
from gateway.policy.view import InstanceView
from gateway.scaling.operation import RequestOutcome
from gateway.upstream import Upstream
from migration.leg import InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """What an instance tells of its drain: its `state`, since when, and how many requests it still serves."""

    state: str
    elapsed_s: float
    remaining: int
    requests: tuple[RequestOutcome, ...]


class Llumlets:
    """Every call ends within `timeout_s`, and raises UpstreamFailed if the instance does not do as told."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s

    async def drain(self, view: InstanceView) -> DrainStatus:
        """Tell it to drain, or ask how far it is if it does so already."""
        raw = await self._upstream.post_json(f"{view.report.url}/midstream/drain", {}, self._timeout_s)
        return _status(view.id, raw)

    async def undrain(self, view: InstanceView) -> DrainStatus | None:
        """Tell it to take requests again. None if it is about to stop and says no."""
        try:
            raw = await self._upstream.post_json(f"{view.report.url}/midstream/undrain", {}, self._timeout_s)
        except UpstreamFailed as error:
            if "instance_leaving" in error.message:
                return None
            raise
        return _status(view.id, raw)


def _status(instance: InstanceId, raw: object) -> DrainStatus:
    match raw:
        case {"state": str(state), "elapsed_s": float() | int() as elapsed_s, "remaining": int(remaining), "requests": list(rows)}:
            return DrainStatus(state, elapsed_s, remaining, _outcomes(instance, rows))
    raise UpstreamBroken("The instance's answer is not the state of a drain.")


def _outcomes(instance: InstanceId, rows: Sequence[object]) -> tuple[RequestOutcome, ...]:
    told = []
    for row in rows:
        match row:
            case {
                "request": str(request),
                "destination": str(destination),
                "result": str(result),
                "reason": str(reason),
                "attempts": int(attempts),
            }:
                told.append(RequestOutcome(RequestId(request), instance, InstanceId(destination), result, reason, attempts))
    return tuple(told)
