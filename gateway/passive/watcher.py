"""Watches passive backends and publishes their reports: one gateway for each backend at a time, by a lease, however many there are.

answers /health and /v1/models    a report, every interval
cannot be reached, or a 5xx       the report is withdrawn: nothing goes there
silent                            no new report: the last one grows old and becomes stale, as any other
answers again                     a report of a new incarnation, by which every gateway knows that it is back
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from backend.registry.instance import InstanceKind
from backend.registry.store import InstanceStore, StoreError
from gateway.dispatcher import Dispatcher
from gateway.errors import UpstreamFailed, UpstreamSilent
from gateway.ledger import Ledger
from gateway.passive.reading import EngineFigures, Passive, ServedModels, read_figures, read_models, report_of
from gateway.passive.roster import PassiveRoster
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from migration.leg import InstanceId

MODELS_INTERVAL_S = 10.0
"""Models are loaded and unloaded seldom: how often a server that is up is asked for them."""

_NONE = ServedModels(())

log = logging.getLogger("midstream.gateway.passive")


@dataclass(eq=False, slots=True)
class _Watched:
    """One backend under this gateway's lease."""

    passive: Passive
    sequence: int = 0
    incarnation: str = ""
    """Empty: not known to be up."""
    models: ServedModels = _NONE
    models_at_s: float = float("-inf")
    busy: bool = False


class PassiveWatch:
    """Owned by the app."""

    def __init__(
        self,
        roster: PassiveRoster,
        store: InstanceStore,
        upstream: Upstream,
        ledger: Ledger,
        dispatcher: Dispatcher,
        settings: GatewaySettings,
        clock: Callable[[], float],
    ) -> None:
        self.roster = roster
        self._store = store
        self._upstream = upstream
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._settings = settings
        self._clock = clock
        self._watched: dict[InstanceId, _Watched] = {}
        self._incarnations: dict[InstanceId, str] = {}
        self._appearances = 0

    async def keep(self) -> None:
        """Look, for ever."""
        async with asyncio.TaskGroup() as looks:
            while True:
                try:
                    async with asyncio.timeout(self._settings.store_timeout_s):
                        await self.look(looks)
                except (StoreError, TimeoutError) as error:
                    log.debug("the store did not answer about passive backends: %r", error)
                except Exception:  # the root of a task; one bad round must not end the watch
                    log.exception("a round of looks at passive backends failed")
                await asyncio.sleep(self._settings.passive_poll_s)

    async def look(self, looks: asyncio.TaskGroup) -> None:
        """One round: begin a look at each backend that is this gateway's to watch. A slow one holds no other up."""
        members = {passive.id: passive for passive in await self.roster.members()}
        for instance in self._watched.keys() - members.keys():
            await self.withdraw(instance)
        for passive in members.values():
            if not await self._is_ours(passive.id):
                self._watched.pop(passive.id, None)
                continue
            watched = self._watched.get(passive.id)
            if watched is None or watched.passive != passive:
                watched = self._watched[passive.id] = _Watched(passive)
            if not watched.busy:
                watched.busy = True
                looks.create_task(self._look_at(watched))
        if members:
            await self._trust_returned()

    async def withdraw(self, instance: InstanceId) -> None:
        """It is not to be used any more. Requests that run there go on. Raises StoreError."""
        self._watched.pop(instance, None)
        await self._store.withdraw(instance)

    async def _is_ours(self, instance: InstanceId) -> bool:
        ttl_s = 3 * self._settings.passive_poll_s
        return await self._store.leases.acquire(f"passive:{instance}", self._settings.gateway_id, ttl_s) is not None

    async def _trust_returned(self) -> None:
        """Whoever suspects a backend that has come back is told, in every gateway."""
        for view in (await self._ledger.view(self._settings.passive_poll_s)).instances:
            if view.report.kind is InstanceKind.PASSIVE:
                if self._incarnations.get(view.id) not in (None, view.report.incarnation):
                    self._dispatcher.trust(view.id)
                self._incarnations[view.id] = view.report.incarnation

    async def _look_at(self, watched: _Watched) -> None:
        try:
            figures = await self._read(watched)
            if self._watched.get(watched.passive.id) is watched:
                await self._publish(watched, figures)
        except UpstreamSilent:
            log.debug("%s is silent", watched.passive.url)
        except UpstreamFailed as failure:
            await self._note_down(watched, failure)
        except (StoreError, TimeoutError) as error:
            log.debug("the store did not take a report of %s: %r", watched.passive.url, error)
        except Exception:  # the root of a task
            log.exception("looking at %s failed", watched.passive.url)
        finally:
            watched.busy = False

    async def _read(self, watched: _Watched) -> EngineFigures | None:
        """Health first; a server without /health is well if it lists its models. Raises UpstreamFailed."""
        url, timeout_s = watched.passive.url, self._settings.passive_timeout_s
        health, _ = await self._upstream.fetch(f"{url}/health", timeout_s)
        if health >= 500:
            raise UpstreamFailed(f"its health is {health}")
        now_s = self._clock()
        if not watched.incarnation or health >= 400 or now_s - watched.models_at_s > MODELS_INTERVAL_S:
            watched.models = await self._read_models(url, timeout_s)
            watched.models_at_s = now_s
        try:
            status, text = await self._upstream.fetch(f"{url}/metrics", timeout_s)
        except UpstreamFailed:
            return None  # it is well, and says so: only its load is unknown
        return read_figures(text.decode(errors="replace")) if status == 200 else None

    async def _read_models(self, url: str, timeout_s: float) -> ServedModels:
        status, body = await self._upstream.fetch(f"{url}/v1/models", timeout_s, self._settings.backend_secret)
        if status != 200:
            raise UpstreamFailed(f"it answers /v1/models with {status}")
        try:
            return read_models(json.loads(body))
        except ValueError as error:
            raise UpstreamFailed("it does not list its models as OpenAI does") from error

    async def _publish(self, watched: _Watched, figures: EngineFigures | None) -> None:
        if not watched.incarnation:
            self._appearances += 1
            watched.incarnation = f"{self._settings.gateway_id}.{self._appearances}"
            log.info("%s is up%s", watched.passive.url, "" if figures else "; it tells no load, so it is used by outstanding requests")
        watched.sequence += 1
        report = report_of(
            watched.passive, watched.models, figures, watched.incarnation, watched.sequence, self._settings.passive_max_batch
        )
        async with asyncio.timeout(self._settings.store_timeout_s):
            await self._store.publish(report, 2 * self._settings.report_stale_s)

    async def _note_down(self, watched: _Watched, failure: UpstreamFailed) -> None:
        """Raises nothing: what cannot be withdrawn now expires."""
        if watched.incarnation or not watched.sequence:
            log.warning("%s is not usable: %s", watched.passive.url, failure.message)
        watched.incarnation = ""
        watched.sequence += 1
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                await self._store.withdraw(watched.passive.id)
        except (StoreError, TimeoutError) as error:
            log.debug("the store did not forget %s: %r", watched.passive.url, error)
