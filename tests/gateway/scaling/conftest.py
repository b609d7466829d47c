"""A gateway with a launcher behind the real HTTP service, that does in memory what a test tells it."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from backend.registry.instance import InstanceState
from backend.registry.memory import MemoryStore
from deploy.launch.service import LauncherService
from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from migration.leg import InstanceId
from tests.gateway.conftest import Rig, live, make_rig, report, until
from tests.gateway.scripted import Exchange, ScriptedBackend

TOKEN = "launch-secret"
QUICK: dict[str, Any] = {
    "launcher_token": TOKEN,
    "operations_interval_s": 0.01,
    "scale_retry_s": 0.02,
    "autoscale_interval_s": 0.01,
    "view_max_age_s": 0.0,
}


@dataclass(eq=False)
class ScriptedLauncher:
    """`refuse` so many orders; those started stay until told to stop, and then as long as `lingering`."""

    known: dict[InstanceId, Launched] = field(default_factory=dict)
    refuse: int = 0
    lingering: bool = False
    stoppable: bool = True
    launches: list[tuple[str, str | None]] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId:
        self.launches.append((key, model))
        self._may_refuse()
        self.put(key, model or "m")
        return key

    async def stop(self, instance: InstanceId) -> None:
        self.stops.append(instance)
        self._may_refuse()
        if self.lingering and instance in self.known:
            self.known[instance] = replace(self.known[instance], state=LaunchState.STOPPING)
        else:
            self.known.pop(instance, None)

    async def list(self) -> Sequence[Launched]:
        return list(self.known.values())

    def put(self, name: str, model: str = "m", **fields: Any) -> None:
        self.known[InstanceId(name)] = Launched(InstanceId(name), model, len(self.known) + 1, 1.0, stoppable=self.stoppable, **fields)

    def _may_refuse(self) -> None:
        if self.refuse:
            self.refuse -= 1
            raise LauncherError("no room")


@dataclass(eq=False)
class Draining:
    """What a scripted backend tells of its drain, and what it was told."""

    remaining: int = 0
    state: str = "ready"
    rows: list[dict[str, object]] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    leaving: bool = False

    def script(self, backend: ScriptedBackend) -> None:
        async def drain(exchange: Exchange) -> None:
            self.orders.append("drain")
            self.state = "draining"
            await self._answer(exchange)

        async def undrain(exchange: Exchange) -> None:
            self.orders.append("undrain")
            if self.leaving:
                await exchange.answer(409, b'{"error":{"message":"about to stop","code":"instance_leaving"}}')
                return
            self.state = "ready"
            await self._answer(exchange)

        backend.others["/midstream/drain"] = drain
        backend.others["/midstream/undrain"] = undrain

    async def _answer(self, exchange: Exchange) -> None:
        told = {"state": self.state, "elapsed_s": 0.5, "remaining": self.remaining, "requests": self.rows}
        await exchange.answer(200, json.dumps(told).encode())


@dataclass(eq=False)
class ScalingRig:
    """Everything together."""

    rig: Rig
    launcher: ScriptedLauncher

    async def add(self, name: str, **fields: Any) -> Draining:
        """An instance that the launcher has started and that is ready."""
        self.launcher.put(name)
        draining = Draining()
        draining.script(await self.rig.add(name, **fields))
        return draining

    async def come_up(self, name: str) -> None:
        """One that was launched is ready."""
        await self.rig.store.publish(report(name, state=InstanceState.READY), ttl_s=1000)

    async def order(self, path: str, **fields: object) -> str:
        response = await self.rig.client.post(f"/admin/{path}", json=fields)
        assert response.status_code == 202, response.text
        return str(response.json()["operation"])

    async def show(self, operation: str) -> dict[str, Any]:
        response = await self.rig.client.get(f"/admin/operations/{operation}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def wait_phase(self, operation: str, phase: str) -> dict[str, Any]:
        """Once every instance of it is in that phase."""

        async def reached() -> bool:
            return all(each["phase"] == phase for each in (await self.show(operation))["instances"])

        await until(reached, within_s=20.0)
        return await self.show(operation)


@asynccontextmanager
async def scaling_rig(
    launcher: ScriptedLauncher | None = None, store: MemoryStore | None = None, **settings: Any
) -> AsyncIterator[ScalingRig]:
    launcher = launcher or ScriptedLauncher()
    async with live(LauncherService(launcher, TOKEN).app()) as url, make_rig(store, **{"launcher_url": url, **QUICK, **settings}) as rig:
        yield ScalingRig(rig, launcher)
