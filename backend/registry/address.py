"""PURE. Where the shared store may be. Refusals do not show what was refused: a password may be in it."""

REDIS = ("redis://", "rediss://", "unix://")
MEMORY = "memory://"
"""Inside one gateway's process."""


def checked_redis(url: str) -> str:
    """The URL of a Redis, as it is. Raises ValueError."""
    if not url.startswith(REDIS):
        raise ValueError(f"the address of a Redis begins with {', '.join(REDIS[:-1])} or {REDIS[-1]}")
    return url


def checked_store(url: str) -> str:
    """The same, or MEMORY. Raises ValueError."""
    if url != MEMORY and not url.startswith(REDIS):
        raise ValueError(f"the address of the shared store is {MEMORY}, or begins with {', '.join(REDIS[:-1])} or {REDIS[-1]}")
    return url
