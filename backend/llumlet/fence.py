"""Keeps out orders of a rebalancer that has lost its lease and does not know it yet."""


class StaleToken(Exception):
    """A larger fencing token has been seen: somebody else holds the lease by now."""


class Fence:
    """Remembers the largest fencing token that came with an order (backend/registry/lease.py)."""

    def __init__(self) -> None:
        self.token = 0

    def pass_through(self, token: int) -> None:
        """Raises StaleToken if a larger one has been here."""
        if token < self.token:
            raise StaleToken(f"the order's token {token} is older than {self.token}, which has been here")
        self.token = token
