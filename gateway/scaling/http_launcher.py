"""A launcher in another process, reached over HTTP (deploy/launch/service.py answers)."""

import asyncio
import json
from collections.abc import Sequence

from gateway.errors import RawHeaders, UpstreamFailed
from gateway.scaling.launcher import Launched, LauncherError
from gateway.upstream import Upstream
from migration.leg import InstanceId
from migration.typed_json import decode

MAX_ANSWER_BYTES = 16 * 2**20
FENCE_HEADER = "x-midstream-fence"


class HttpLauncher:
    """Implements Launcher. `token` is shown as a bearer's; every call ends within `timeout_s`."""

    def __init__(self, upstream: Upstream, url: str, token: str | None, timeout_s: float) -> None:
        self._upstream = upstream
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    async def launch(self, key: InstanceId, model: str | None, fence: int) -> InstanceId:
        answer = await self._ask("PUT", f"/instances/{key}", {"model": model}, fence)
        match answer:
            case {"instance": str(instance)}:
                return InstanceId(instance)
        raise LauncherError("The launcher's answer names no instance.")

    async def stop(self, instance: InstanceId, fence: int) -> None:
        await self._ask("DELETE", f"/instances/{instance}", None, fence)

    async def list(self) -> Sequence[Launched]:
        answer = await self._ask("GET", "/instances", None, None)
        rows = answer.get("instances") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise LauncherError("The launcher's answer is not a list of instances.")
        try:
            return [decode(Launched, row) for row in rows]
        except ValueError as error:
            raise LauncherError(f"The launcher's answer makes no sense: {error}") from error

    async def _ask(self, method: str, target: str, question: object, fence: int | None) -> object:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.request(method, self._url + target, self._headers(fence), json.dumps(question).encode())
                async with response:
                    text = await response.read_all(MAX_ANSWER_BYTES)
        except (TimeoutError, UpstreamFailed) as error:
            raise LauncherError(f"The launcher at {self._url} does not answer: {str(error) or 'no answer in time'}") from error
        try:
            answer: object = json.loads(text)
        except ValueError as error:
            raise LauncherError(f"The launcher answered with status {response.status} and no JSON.") from error
        if response.status != 200:
            raise LauncherError(_message(answer) or f"The launcher answered with status {response.status}.")
        return answer

    def _headers(self, fence: int | None) -> RawHeaders:
        headers = [(b"content-type", b"application/json")]
        if self._token:
            headers.append((b"authorization", f"Bearer {self._token}".encode()))
        if fence is not None:
            headers.append((FENCE_HEADER.encode(), str(fence).encode()))
        return headers


def _message(answer: object) -> str:
    match answer:
        case {"error": {"message": str(message)}}:
            return message
    return ""
