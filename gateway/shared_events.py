"""The event feeds of all gateways on one store are one: what is published at one is told by the others, too.

It goes through the store's news, which keep nothing. Not shared is what each gateway sees for itself: the instances that come and go.
"""

import asyncio
import json
import logging
import secrets

from backend.registry.store import StoreError
from gateway.events import EventFeed
from gateway.ledger import Ledger
from gateway.settings import GatewaySettings

log = logging.getLogger("midstream.gateway.events")


class SharedEvents:
    """One gateway's ear and mouth. Without a store, or while it does not answer, the feed tells of this gateway alone."""

    def __init__(self, feed: EventFeed, ledger: Ledger, settings: GatewaySettings) -> None:
        self._feed, self._ledger, self._retry_s = feed, ledger, settings.store_retry_s
        self._gateway = settings.gateway_id
        self._teller = secrets.token_hex(8)  # two gateways of one name are still two

    async def tell(self) -> None:
        """What happens here, for ever."""
        while (event := await self._feed.outgoing.next()) is not None:
            if event.number:  # else it says how many were lost on the way
                told = json.dumps({"teller": self._teller, "gateway": self._gateway, "kind": event.kind, "fields": event.fields})
                try:
                    await self._ledger.ask(lambda told=told: self._ledger.news.tell(told))  # type: ignore[misc]
                except StoreError:
                    continue  # counted and logged by ask

    async def hear(self) -> None:
        """What happens elsewhere, for ever."""
        while True:
            try:
                async with self._ledger.news.listen() as hearing:
                    while True:
                        self._take(await hearing.next())
            except StoreError as error:
                log.debug("the store's news are not heard: %r", error)
            except Exception:  # the root of a task
                log.exception("listening to the store failed")
            await asyncio.sleep(self._retry_s)

    def _take(self, text: str) -> None:
        try:
            told = json.loads(text)
            if told["teller"] != self._teller:
                self._feed.pass_on(str(told["kind"]), {**told["fields"], "gateway": str(told["gateway"])})
        except (ValueError, KeyError, TypeError) as error:
            log.warning("another gateway tells what cannot be understood: %r", error)
