"""What all migrations from this instance to one peer share: the order of transfers on their channel, and the transfers' numbers."""

import asyncio
import itertools


class Pair:
    """One per (source, destination). Transfers on a channel must start in the same order on both sides, so whoever announces one
    (Reserve, Commit) holds `order` until it is sent. Numbers are never used twice, so that a leftover is recognised.
    """

    def __init__(self) -> None:
        self.order = asyncio.Lock()
        self._numbers = itertools.count(1)

    def next_transfer(self) -> int:
        """A number for the next transfer."""
        return next(self._numbers)
