"""How fast each line moves, as this gateway sees it: what those that are refused are told."""

from collections.abc import Callable

from backend.registry.line import LineSight, Ticket
from backend.registry.store import StoreError
from gateway.ledger import Ledger
from gateway.policy.config import Policy
from gateway.policy.pace import Pace, retry_after_s


class LinePace:
    """Owned by the line."""

    def __init__(self, ledger: Ledger, policy: Policy, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._policy = policy
        self._clock = clock
        self._paces: dict[str, Pace] = {}

    def see(self, line: str, sight: LineSight) -> None:
        """One more look at a line."""
        now_s = self._clock()
        known = self._paces.get(line)
        self._paces[line] = Pace(sight.bound, now_s) if known is None else known.seen(sight.bound, now_s)

    def retry_after_s(self, ticket: Ticket, sight: LineSight) -> int:
        """When those that come before the ticket will have gone."""
        before = sum(count for tier, count in sight.waiting.items() if self._policy.rank_of(tier) <= ticket.rank)
        pace = self._paces.get(ticket.line)
        return retry_after_s(before, pace.per_s if pace else None)

    async def ask_retry_after_s(self, ticket: Ticket) -> int:
        """The same, with a fresh look at how many wait."""
        try:
            sight = await self._ledger.ask(lambda: self._ledger.line.look(ticket.line, 0))
        except StoreError:
            return retry_after_s(0, None)
        self.see(ticket.line, sight)
        return self.retry_after_s(ticket, sight)
