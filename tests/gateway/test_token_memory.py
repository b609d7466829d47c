"""What is remembered is counted, bounded, and given back."""

from prometheus_client import CollectorRegistry, Gauge

from gateway.token_memory import TokenMemory


def test_bounds_for_one_and_for_all() -> None:
    registry = CollectorRegistry()
    memory = TokenMemory(1000, 600, Gauge("remembered", "x", registry=registry))
    first, second = memory.share(), memory.share()
    assert first.cover(600)
    assert not first.cover(601)
    assert second.cover(400)
    assert not second.cover(401)
    assert registry.get_sample_value("remembered") == 1000
    assert first.cover(0)
    assert second.cover(500)
    assert second.cover(0)
    assert (memory.tokens, registry.get_sample_value("remembered")) == (0, 0)
