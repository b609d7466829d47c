"""PURE. Where the shared store is, as settings name it."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator

SCHEMES = ("redis://", "rediss://", "unix://", "memory://")


def checked(url: str) -> str:
    """The URL as it is. Raises ValueError, which does not show it: a password may be in it."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"the address of the shared store begins with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}")
    return url


StoreUrl: TypeAlias = Annotated[str, AfterValidator(checked)]
"""For a field of settings."""
