import asyncio

from bench.stream import Seen


def seen(*at_s: float, ordered_s: float = 0.0, over_s: float = 0.0, downtime_ms: float | None = None) -> Seen:
    return Seen(at_s=list(at_s), ordered_s=ordered_s, over_s=over_s, outcome={"downtime_ms": downtime_ms}, done=True)


def test_the_downtime_is_the_gap_nearest_to_what_the_relay_saw() -> None:
    moved = seen(0.0, 0.1, 0.4, 0.6, 0.7, ordered_s=0.05, over_s=0.65, downtime_ms=198.0)
    assert round(moved.downtime_ms) == 200


def test_without_the_relays_word_it_is_the_longest_of_that_time() -> None:
    moved = seen(0.0, 0.9, 1.0, 1.3, 1.4, ordered_s=0.95, over_s=1.35)
    assert round(moved.downtime_ms) == 300


def test_gaps_lie_wholly_within_the_window() -> None:
    assert [round(gap) for gap in seen(0.0, 0.1, 0.3, 0.6).gaps_ms(0.05, 0.5)] == [200]


async def test_waiting_for_tokens_ends_with_the_stream() -> None:
    stream = Seen(at_s=[0.0])
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        waiting = group.create_task(stream.wait_tokens(2))
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.at_s.append(1.0)
        stream.grown.set()
        await waiting
        stream.done = True
        await stream.wait_tokens(10)
