"""A Redis of its own, as the tests of the registry use it."""

from tests.backend.registry.conftest import redis_url

__all__ = ["redis_url"]
