"""What is remembered is counted, bounded, and given back."""

from prometheus_client import CollectorRegistry, Gauge

from gateway.token_memory import TokenMemory


def test_bounds_for_one_and_for_all() -> None:
    registry = CollectorRegistry()
    memory = TokenMemory(10, 6, Gauge("remembered", "x", registry=registry))
    first, second = memory.share(), memory.share()
    assert first.cover(6)
    assert not first.cover(7)
    assert second.cover(4)
    assert not second.cover(5)
    assert registry.get_sample_value("remembered") == 10
    assert first.cover(0)
    assert second.cover(5)
    assert second.cover(0)
    assert (memory.tokens, registry.get_sample_value("remembered")) == (0, 0)
