"""What flags of the command line may be."""

import argparse
from typing import TypeAlias
from urllib.parse import urlsplit

from backend.registry.address import checked_redis

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def scale(text: str) -> float:
    """A factor above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def port(text: str) -> int:
    """A TCP port, for argparse."""
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be between 1 and 65535")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, for argparse."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between them, not '{text}'") from None


def server(text: str) -> str:
    """The base URL of an HTTP server, for argparse."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"a URL that begins with http:// or https://, not '{text}'")
    return text


def store(text: str) -> str:
    """The URL of a Redis, for argparse."""
    try:
        return checked_redis(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
